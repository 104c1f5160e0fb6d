"""Comparisons: a matrix of runs that share everything else, and a table over seeds."""

from pathlib import Path

import pytest

from pliant.compare import crew, is_finished, members, run_all, table
from pliant.engine.store import events
from pliant.engine.workers import Cluster, Inline, Processes
from pliant.experiment import begin
from pliant.value import encode

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
    found = members(spec)
    assert [member.name for member in found] == [
        "seed=0,method=plain",
        "seed=0,method=narrow",
        "seed=1,method=plain",
        "seed=1,method=narrow",
    ]
    assert all(member.experiment.method.local.batch == 64 for member in found)
    plain, narrow = (encode(member.experiment) for member in found[:2])
    assert {key for key in plain if plain[key] != narrow[key]} == {"method"}


def test_a_comparison_is_run_once_and_then_kept(spec: Path, tmp_path: Path) -> None:
    found, folder = members(spec, ["rounds=1"])[:2], tmp_path / "runs"
    told: list[str] = []
    run_all(found, folder, Inline(), lambda member: told.append(member.name))
    assert told == [member.name for member in found]
    assert all(is_finished(folder / member.name, member) for member in found)
    run_all(found, folder, Inline(), lambda member: told.append(member.name))
    assert len(told) == 2
    rows = table(found, folder, target=0.0)
    assert [row.group for row in rows] == [(("method", "plain"),), (("method", "narrow"),)]
    last = list(events(folder / found[0].name))[-1]
    assert rows[0].accuracy[0] == last.accuracy
    assert rows[0].rounds_to == 1


def test_another_experiment_in_the_same_folder_is_refused(spec: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    run_all(members(spec, ["rounds=1"])[:1], folder, Inline())
    (folder / "seed=0,method=plain" / "events.jsonl").unlink()
    with pytest.raises(ValueError, match="holds another experiment of that name"):
        run_all(members(spec, ["rounds=2"])[:1], folder, Inline())


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ("matrix = 3", r"expected a table \[matrix\], got 3"),
        ("[matrix]\nseed = []", r"expected a list or a table of values at matrix.seed, got \[\]"),
        ("[matrix]\nseed = ['x']", r"with seed = x: Expected `int` at `seed`, got 'x'"),
        ("[matrix]\nnonsense = [1]", "unknown key `nonsense`"),
    ],
)
def test_a_wrong_matrix_is_told_in_one_line(tmp_path: Path, matrix: str, message: str) -> None:
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
        members(path)
    assert "\n" not in str(caught.value)


def test_the_file_says_which_workers_share_the_runs(spec: Path) -> None:
    assert crew(members(spec)) == Processes()
    assert crew(members(spec, ['workers={type="ray",count=2}'])) == Cluster(count=2)
    mixed = ['matrix.workers=[{type="inline"},{type="processes"}]']
    with pytest.raises(ValueError, match="the same workers for all runs"):
        crew(members(spec, mixed))


def test_a_comparison_goes_on_with_other_workers(spec: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    first = members(spec, ["rounds=1", 'workers={type="processes",count=1}'])[:1]
    begin(folder / first[0].name, first[0].experiment)
    again = members(spec, ["rounds=1", 'workers={type="inline"}'])[:1]
    run_all(again, folder, crew(again))
    assert is_finished(folder / again[0].name, again[0])
