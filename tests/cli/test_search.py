import re
import runpy
import sys
from pathlib import Path

import msgspec
import pytest

from pliant import cli
from pliant.nn.table_file import load_table
from pliant.table_search.trial_log import TRIALS_FILE, read_trials

SPEC = """
workers = { type = "inline" }
[data]
proxy = 200
[search]
algorithm = { type = "fast", min_design = 6, rounds = 1, per_round = 3, vectors = 3 }
profile = "profile.json"
corner_seeds = 2
fresh_seeds = 1
rows = 4
[search.objective]
batches = 2
batch = 8
seeds = 1
snapshot_batches = 2
eval_images = 40
"""
PROFILE = '{"format": 2, "start": 0.001, "per_mac": 1e-11, "per_byte": 1e-9, "batch": 32}'
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "search_axes.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searches")
    (folder / "small.toml").write_text(SPEC)
    (folder / "profile.json").write_text(PROFILE)
    assert run(folder, "macs") == 0
    return folder


def run(folder, out, *options, json="--json"):
    spec, out_folder = str(folder / "small.toml"), str(folder / out)
    return cli.main(["search", spec, *options, "--out", out_folder, "--no-pictures", json])


def test_a_search_by_seconds_reuses_the_trainings_of_one_by_macs(folder):
    by_macs = {(trial.rates, trial.seed) for trial in read_trials(folder / "macs" / TRIALS_FILE)}
    assert run(folder, "alone", "search.cost=seconds") == 0
    assert run(folder, "reused", "search.cost=seconds", "--records", str(folder / "macs")) == 0
    alone = {(trial.rates, trial.seed) for trial in read_trials(folder / "alone" / TRIALS_FILE)}
    reused = {(trial.rates, trial.seed) for trial in read_trials(folder / "reused" / TRIALS_FILE)}
    assert reused == by_macs | alone
    assert len(by_macs & alone) >= 4 + 6  # the corners and the first design
    tables = [folder / name / "table.safetensors" for name in ("alone", "reused")]
    assert load_table(tables[0]) == load_table(tables[1])


def test_the_rates_of_two_axes_are_printed_site_by_site(folder, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    assert run(folder, "seconds", "search.cost=seconds", "--records", str(folder / "macs")) == 0
    picture = folder / "axes.png"
    folders = [str(folder / "macs"), str(folder / "seconds")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *folders, "--picture", str(picture)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.count("% of the full step's time") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_search_of_stages_prints_and_draws_every_stage(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    spec = tmp_path / "staged.toml"
    spec.write_text(
        SPEC.replace('profile = "profile.json"', "batch_shares = [0.5]\nstages = [0, 0.5]")
    )
    out = tmp_path / "out"
    assert cli.main(["search", str(spec), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("stage")] == ["stage 0", "stage 0.5"]
    table = load_table(out / "table.safetensors")
    assert sum(" batch " in line for line in lines) == len(table.rates)
    assert {path.name for path in out.glob("*.png")} == {
        f"{name}-{stage}.png" for name in ("front", "vectors") for stage in (1, 2)
    }


def test_a_terminal_shows_a_bar_from_the_start(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert run(folder, "macs", json="--no-json") == 0  # finished before, so it ends at once
    output, errors = capsys.readouterr()
    assert re.search(r"done .* (\d+)/\1 short trainings  hypervolume \d\.\d{4}.*left", errors)
    assert "short trainings  hypervolume" not in output


def test_a_folder_without_records_is_an_error_and_nothing_is_written(folder, capsys):
    assert run(folder, "new", "--records", str(folder / "nowhere")) != 0
    assert "nowhere" in capsys.readouterr().err
    assert not (folder / "new").exists()


def test_a_side_at_which_the_network_cannot_run_is_an_error_and_nothing_is_written(folder, capsys):
    assert run(folder, "sides", "search.sides=[14]") == 2
    error = capsys.readouterr().err
    assert "cannot run at 14x14" in error
    assert error.count("\n") == 1
    assert not (folder / "sides").exists()


def test_a_folder_of_another_search_is_refused(folder, capsys):
    assert run(folder, "macs", "search.seed=1") != 0
    assert "holds another search" in capsys.readouterr().err


def test_a_search_from_before_a_field_existed_resumes(folder):
    config = folder / "macs" / "config.json"
    raw = msgspec.json.decode(config.read_bytes())
    del raw["data"]["proxy_seed"]
    config.write_bytes(msgspec.json.encode(raw))
    assert run(folder, "macs") == 0


def test_the_help_explains_how_to_search_by_seconds(capsys):
    assert cli.main(["search", "--help"]) == 0
    output = capsys.readouterr().out
    assert "search.cost=seconds" in output
    assert "--records" in output
