"""Runs are grouped and labelled."""

import json

import pytest
from tests.analysis.runs_on_disk import write_run

from pliant.analysis.runs import flatten_config, group_runs, load_runs


def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path):
    for method in ("fedavg", "distreal"):
        for seed in (0, 1, 2):
            name = f"rules.late=wait,seed={seed},method={method}"
            write_run(tmp_path / name, [0.5], seed=seed, method={"type": method})
    groups = group_runs(load_runs([tmp_path]))
    assert {group.label: len(group.runs) for group in groups} == {
        "wait fedavg": 3,
        "wait distreal": 3,
    }


def test_workers_do_not_separate_groups(tmp_path):
    write_run(tmp_path / "a", [0.5], workers={"type": "inline"})
    write_run(tmp_path / "b", [0.5], workers={"type": "processes"})
    assert len(group_runs(load_runs([tmp_path]))) == 1


def test_groups_with_the_same_short_name_get_their_full_name(tmp_path):
    write_run(tmp_path / "x" / "method=a", [0.5], rounds=1)
    write_run(tmp_path / "y" / "method=a", [0.5], rounds=2)
    assert [group.label for group in group_runs(load_runs([tmp_path]))] == [
        "x/method=a",
        "y/method=a",
    ]


def test_a_run_named_twice_is_read_once(tmp_path):
    folder = write_run(tmp_path / "a", [0.5])
    assert [run.name for run in load_runs([tmp_path, folder])] == ["a"]


def test_runs_without_records_are_left_out(tmp_path):
    write_run(tmp_path / "a", [0.5])
    (write_run(tmp_path / "b", []) / "events.jsonl").unlink()
    assert [run.name for run in load_runs([tmp_path])] == ["a"]


def test_a_missing_folder_and_a_broken_config_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        load_runs([tmp_path / "none"])
    folder = write_run(tmp_path / "a", [0.5])
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: "):
        load_runs([tmp_path])


def test_a_config_is_flattened_and_long_lists_are_counted():
    config = {"method": {"lr": 0.1, "table": {"rates": [0.123456789] * 50}}, "seed": 3}
    leaves = flatten_config(config)
    assert leaves == {"method.lr": "0.1", "method.table.rates": "[50 entries]", "seed": "3"}
    assert json.loads(leaves["seed"]) == 3
