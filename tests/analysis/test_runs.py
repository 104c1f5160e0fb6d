"""Runs are grouped and labelled, and their records read by column."""

import json

import numpy as np
import pytest
from tests.analysis.runs_on_disk import write_run

from pliant.analysis.runs import (
    RunGroup,
    flatten_config,
    group_runs,
    load_runs,
    select_finished,
)
from pliant.analysis.timeline import load_tasks


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


def load_run(folder):
    (run,) = load_runs([folder])
    return run


def test_costs_add_up_over_rounds(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, None, 0.3], late={(1, 7)})
    run = load_run(folder)
    assert run.axis("rounds").tolist() == [1, 2, 3]
    assert run.axis("seconds").tolist() == [1, 2, 3]
    assert run.axis("macs").tolist() == [200, 400, 600]
    assert run.axis("bytes").tolist() == [3000, 6000, 9000]
    assert np.isfinite(run["accuracy"]).tolist() == [True, False, True]
    assert run.final_accuracy == 0.3
    assert RunGroup("", (run,)).outcome_counts == {"finished": 5, "late": 1}


def test_a_record_cut_short_by_a_kill_is_ignored(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'{"type":"round","round":2,"seco')
    assert len(load_run(folder)["round"]) == 2


def test_a_run_without_a_round_is_not_finished(tmp_path):
    folder = write_run(tmp_path / "run", [])
    (folder / "events.jsonl").write_bytes(b'{"type":"task","round":0}\n')
    assert load_run(folder).rounds == []
    assert select_finished(group_runs(load_runs([folder]))) == []


def test_the_accuracy_is_the_mean_of_the_devices_own_tests(tmp_path):
    folder = write_run(tmp_path / "run", [])
    line = b'{"type":"round","round":0,"seconds":1.0,"personal":{"per_device":[0.25,0.75]}}\n'
    (folder / "events.jsonl").write_bytes(line)
    run = load_run(folder)
    assert run.final_accuracy == 0.5
    assert run.total("macs") == 0  # not recorded


@pytest.mark.parametrize("name", ["it's", "a*b", "[x]", "method=a,seed=0", "ü"])
def test_a_folder_may_have_any_name(tmp_path, name):
    assert load_run(write_run(tmp_path / name, [0.5])).final_accuracy == 0.5


def test_mini_batches_have_times_since_the_start_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3], late={(1, 7)})
    tasks = load_tasks(load_run(folder), 1, 1)
    assert [(task.round, task.device, task.outcome) for task in tasks] == [
        (1, 4, "finished"),
        (1, 7, "late"),
    ]
    assert (tasks[0].starts, tasks[0].ends) == ([1.0, 1.4], [1.4, 1.8])
    assert tasks[1].ends == [1.4, 1.8]  # cut off when the device stopped
    assert tasks[1].rows == [1, 0]
