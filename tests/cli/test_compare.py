"""`pliant compare`: the table always belongs to the experiment that was asked for."""

import json
from dataclasses import MISSING, fields

import pytest

from pliant.analysis.summary import SummaryRow
from pliant.cli import main
from pliant.cli.compare import _format_table
from pliant.storage.run_lock import RunLock

SPEC = """
rounds = 1
per_round = 2
workers = { type = "inline" }

[method]
type = "fedavg"

[fleet]
size = 100

[network]
options = { hidden = 4 }

[matrix]
seed = [0]
"""


@pytest.fixture
def compare(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(SPEC)

    def compare(*words):
        capsys.readouterr()
        command = ["compare", tmp_path / "small.toml", "--out", tmp_path / "runs", "--json", *words]
        code = main([str(word) for word in command])
        output, errors = capsys.readouterr()
        return code, output, errors

    return compare


def test_runs_of_another_experiment_are_refused_in_one_line(compare, tmp_path):
    assert compare()[0] == 0
    before = (tmp_path / "runs/seed=0/events.jsonl").read_bytes()
    code, output, errors = compare("rounds=2")
    assert (code, output) == (2, "")
    assert "runs/seed=0 holds a run with rounds = 1, not 2: " in errors
    assert errors.count("\n") == 1
    assert (tmp_path / "runs/seed=0/events.jsonl").read_bytes() == before
    assert compare()[0] == 0


def test_a_refused_comparison_leaves_nothing_behind(compare, tmp_path):
    code, _, errors = compare("network.options.hidden=0")
    assert (code, errors.count("\n")) == (2, 1)
    assert not (tmp_path / "runs").exists()
    assert compare()[0] == 0


def test_fresh_runs_again_and_keeps_every_old_folder(compare, tmp_path):
    tables = [json.loads(compare("--fresh", f"rounds={n}")[1])["gigamacs"] for n in (1, 2, 3)]
    assert tables[1] == pytest.approx(2 * tables[0])
    assert tables[2] == pytest.approx(3 * tables[0])
    names = {"runs.old-1": 1, "runs.old-2": 2, "runs": 3}
    for name, rounds in names.items():
        assert json.loads((tmp_path / name / "seed=0/config.json").read_bytes())["rounds"] == rounds
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "small.toml"])


def test_fresh_leaves_a_folder_in_use_alone(compare, tmp_path):
    assert compare()[0] == 0
    lock = RunLock(tmp_path / "runs/seed=0")
    code, _, errors = compare("--fresh")
    lock.release()
    assert code != 0
    assert "in use by process" in errors
    assert not (tmp_path / "runs.old-1").exists()


def test_a_run_without_any_device_has_no_shares(compare, tmp_path, capsys):
    never = 'fleet.speed={type="constant", low=0.0}'
    (tmp_path / "small.toml").write_text(f'select = "available"\n{SPEC}')
    code, output, _ = compare(never)
    row = json.loads(output)
    assert (code, row["utilisation"], row["lost_share"]) == (0, None, None)
    command = ["compare", tmp_path / "small.toml", never, "--out", tmp_path / "runs"]
    assert main([str(word) for word in command]) == 0
    header = capsys.readouterr().out.splitlines()[0].split()
    assert header == ["accuracy", "images", "GMACs", "MB", "best", "C3"]  # no empty columns


def test_the_budgets_of_the_score_stand_under_the_table(compare, tmp_path, capsys):
    row = json.loads(compare()[1])
    files = [str(tmp_path / "small.toml"), "--out", str(tmp_path / "runs")]
    assert main(["compare", *files]) == 0
    budgets = f"{row['megabytes']:.1f} MB and {row['gigamacs']:.1f} GMACs"
    *_, line, hint = capsys.readouterr().out.splitlines()
    assert line == f"C3 budgets, the largest above: {budgets}"
    assert hint == f"next: pliant report {tmp_path / 'runs'}"


def make_row(label, seeds, **values):
    """Return a row of the table with numbers of a usual size."""
    costs = dict.fromkeys(("seconds", "gigamacs", "megabytes", "best_accuracy"), 1234.5)
    unknown = {field.name: None for field in fields(SummaryRow) if field.default is MISSING}
    group = (("method", label),)
    return SummaryRow(
        **unknown | costs | {"group": group, "seeds": seeds, "accuracy": (0.9, 0.01)} | values
    )


def test_the_table_fits_a_hundred_columns_and_says_what_is_missing():
    names = ("trained_accuracy", "utilisation", "lost_share", "local_accuracy", "local_c3")
    known = dict.fromkeys(names, 0.5) | {"rounds_to_target": 10.0, "seconds_to_target": 20.0}
    table = _format_table([make_row("a" * 60, 3, **known)], 0.9)
    head, row, note, _ = table.splitlines()
    assert max(len(head), len(row)) <= 100
    assert row.startswith("a" * 31 + "…  90.00% ± 1.00%")
    assert note.startswith("--json also has images, best, trained")
    assert "rounds to 90%" in head


def test_one_seed_has_no_spread():
    table = _format_table([make_row("a", 1), make_row("b", 1)], 0.9)
    assert "±" not in table
    assert table.splitlines()[0].split() == ["accuracy", "images", "GMACs", "MB", "best", "C3"]
