"""Sweeps: a matrix of runs that share everything else, and a table over seeds."""

from pathlib import Path

import pytest

from pliant.analysis.summary import summarise
from pliant.engine.run_store import read_records
from pliant.experiment.config import start_run
from pliant.experiment.sweep import is_finished, load_sweep, resolve_workers, run_sweep, select_runs
from pliant.value import encode
from pliant.workers.pool import InlineWorkers, ProcessWorkers, RayWorkers

SPEC = """
rounds = 2
per_round = 2
[method]
local = {batch = 64}
[network]
name = "digits_cnn"
options = {filters1 = 4}
[data]
proxy = 7800
[fleet]
size = 4
speed = {type = "changing", low = 0.4, high = 1.0, per_round = 2.0}
[rules]
late = "partial"
[matrix]
seed = [0, 1]
[matrix.method]
plain = {type = "fedavg"}
narrow = {type = "distreal", budget = "paced"}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SPEC.replace("options = {filters1 = 4}\n", ""))
    return path


def test_every_combination_is_a_run_and_shares_the_rest(spec: Path) -> None:
    runs = load_sweep(spec)
    assert [run.name for run in runs] == [
        "seed=0,method=plain",
        "seed=0,method=narrow",
        "seed=1,method=plain",
        "seed=1,method=narrow",
    ]
    assert all(run.experiment.method.local.batch == 64 for run in runs)
    plain, narrow = (encode(run.experiment) for run in runs[:2])
    assert {key for key in plain if plain[key] != narrow[key]} == {"method"}


def test_a_sweep_is_limited_to_some_values_of_its_axes(spec: Path) -> None:
    runs = load_sweep(spec)

    def select(*only: str) -> list[str]:
        return [run.name for run in select_runs(runs, only)]

    assert select() == [run.name for run in runs]
    assert select("method=narrow") == ["seed=0,method=narrow", "seed=1,method=narrow"]
    assert select("method=narrow", "seed=1") == ["seed=1,method=narrow"]
    assert select("seed=0", "seed=1", "method=plain") == [runs[0].name, runs[2].name]
    with pytest.raises(ValueError, match="got 'method=narow'; did you mean 'method=narrow'"):
        select("method=narow")
    with pytest.raises(ValueError, match="got 'narrow'; "):
        select("narrow")


def test_an_axis_below_one_that_is_no_table_is_refused(tmp_path) -> None:
    path = tmp_path / "below.toml"
    path.write_text('[fleet]\nsize = 2\n[matrix]\nmethod = [true]\n"method.local.batch" = [1]\n')
    with pytest.raises(ValueError, match=r"with method = True, .*: Expected a table at `method`"):
        load_sweep(path)


def test_warnings_are_returned_with_the_name_of_their_run(spec, tmp_path, capfd) -> None:
    too_slow = [
        "rounds=3",
        "rules.late=discard",
        'fleet.speed={type="constant",low=0.01,high=0.01}',
    ]
    runs = load_sweep(spec, too_slow)[:1]
    text = "seed=0,method=plain: no update was merged in rounds 1 to 3: in the last, 2 late"
    assert run_sweep(runs, tmp_path / "runs", ProcessWorkers(1)) == [text]
    assert capfd.readouterr().err == ""  # it would be printed across the progress bar


def test_finished_runs_are_not_run_again(spec: Path, tmp_path: Path) -> None:
    runs, folder = load_sweep(spec, ["rounds=1"])[:2], tmp_path / "runs"
    finished: list[str] = []
    run_sweep(runs, folder, InlineWorkers(), lambda run: finished.append(run.name))
    assert finished == [run.name for run in runs]
    assert all(is_finished(folder / run.name) for run in runs)
    run_sweep(runs, folder, InlineWorkers(), lambda run: finished.append(run.name))
    assert len(finished) == 2
    rows = summarise(runs, folder, target=0.0)
    assert [row.group for row in rows] == [(("method", "plain"),), (("method", "narrow"),)]
    last = list(read_records(folder / runs[0].name))[-1]
    assert rows[0].accuracy[0] == last.accuracy
    assert rows[0].rounds_to_target == 1


@pytest.mark.parametrize("has_records", [True, False])
def test_another_experiment_in_the_same_folder_is_refused(
    spec: Path, tmp_path: Path, has_records: bool
) -> None:
    folder = tmp_path / "runs"
    run_sweep(load_sweep(spec, ["rounds=1"])[:1], folder, InlineWorkers())
    if not has_records:
        (folder / "seed=0,method=plain" / "events.jsonl").unlink()
    with pytest.raises(ValueError, match=r"seed=0,method=plain holds a run with rounds = 1, not 2"):
        run_sweep(load_sweep(spec, ["rounds=2"])[:2], folder, InlineWorkers())
    assert [path.name for path in folder.iterdir()] == ["seed=0,method=plain"]


def test_a_search_in_the_same_file_does_not_make_another_experiment(
    spec: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    run_sweep(load_sweep(spec, ["rounds=1"])[:1], folder, InlineWorkers())
    run_sweep(load_sweep(spec, ["rounds=1", "search.rows=8"])[:1], folder, InlineWorkers())


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ("matrix = 3", r"expected a table \[matrix\], got 3"),
        ("[matrix]\nseed = []", r"expected a list or a table of values at matrix.seed, got \[\]"),
        ("[matrix]\nseed = ['x']", r"with seed = x: Expected `int` at `seed`, got 'x'"),
        ("[matrix]\nnonsense = [1]", "unknown key `nonsense`"),
    ],
)
def test_a_wrong_matrix_is_a_one_line_error(tmp_path: Path, matrix: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    head, _, _ = SPEC.partition("[matrix]")
    top = matrix + "\n" if matrix.startswith("matrix") else ""
    path.write_text(
        top
        + head.replace("options = {filters1 = 4}\n", "").replace(
            "[method]", "[method]\ntype = 'fedavg'"
        )
        + ("" if top else matrix)
    )
    with pytest.raises(ValueError, match=message) as caught:
        load_sweep(path)
    assert "\n" not in str(caught.value)


def test_the_file_chooses_the_workers(spec: Path) -> None:
    assert resolve_workers(load_sweep(spec)) == ProcessWorkers()
    assert resolve_workers(load_sweep(spec, ['workers={type="ray",count=2}'])) == RayWorkers(
        count=2
    )
    mixed = ['matrix.workers=[{type="inline"},{type="processes"}]']
    with pytest.raises(ValueError, match="the same workers for all runs"):
        resolve_workers(load_sweep(spec, mixed))


def test_a_sweep_resumes_with_other_workers(spec: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    first = load_sweep(spec, ["rounds=1", 'workers={type="processes",count=1}'])[:1]
    start_run(folder / first[0].name, first[0].experiment)
    again = load_sweep(spec, ["rounds=1", 'workers={type="inline"}'])[:1]
    run_sweep(again, folder, resolve_workers(again))
    assert is_finished(folder / again[0].name)
