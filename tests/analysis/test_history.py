"""Records are read by column, straight from the JSON lines."""

import numpy as np
import pytest
from tests.analysis.runs_on_disk import write_run

from pliant.analysis.history import (
    GroupHistory,
    RunHistory,
    load_group_histories,
    load_task_timelines,
)
from pliant.analysis.records import read_rounds
from pliant.analysis.runs import group_runs, load_runs


def load_history(folder):
    (run,) = load_runs([folder])
    return RunHistory(run, read_rounds(folder))


def test_costs_add_up_over_rounds(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, None, 0.3], late={(1, 7)})
    history = load_history(folder)
    assert history.axis("rounds").tolist() == [1, 2, 3]
    assert history.axis("seconds").tolist() == [1, 2, 3]
    assert history.axis("macs").tolist() == [200, 400, 600]
    assert history.axis("bytes").tolist() == [3000, 6000, 9000]
    assert np.isfinite(history["accuracy"]).tolist() == [True, False, True]
    assert history.final_accuracy == 0.3
    assert GroupHistory(None, [history]).outcome_counts == {"finished": 5, "late": 1}


def test_a_record_cut_short_by_a_kill_is_ignored(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'{"type":"round","round":2,"seco')
    assert len(load_history(folder)["round"]) == 2


def test_a_run_without_a_round_has_no_history(tmp_path):
    folder = write_run(tmp_path / "run", [])
    (folder / "events.jsonl").write_bytes(b'{"type":"task","round":0}\n')
    assert load_history(folder).rounds == []
    assert load_group_histories(group_runs(load_runs([folder]))) == []


def test_the_accuracy_is_the_mean_of_the_devices_own_tests(tmp_path):
    folder = write_run(tmp_path / "run", [])
    line = b'{"type":"round","round":0,"seconds":1.0,"personal":{"per_device":[0.25,0.75]}}\n'
    (folder / "events.jsonl").write_bytes(line)
    history = load_history(folder)
    assert history.final_accuracy == 0.5
    assert history.total("macs") == 0  # not recorded


@pytest.mark.parametrize("name", ["it's", "a*b", "[x]", "method=a,seed=0", "ü"])
def test_a_folder_may_have_any_name(tmp_path, name):
    assert load_history(write_run(tmp_path / name, [0.5])).final_accuracy == 0.5


def test_mini_batches_have_times_since_the_start_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3], late={(1, 7)})
    tasks = load_task_timelines(load_history(folder), 1, 1)
    assert [(task.round, task.device, task.outcome) for task in tasks] == [
        (1, 4, "finished"),
        (1, 7, "late"),
    ]
    assert tasks[0].spans == ((1.0, 1.4), (1.4, 1.8))
    assert tasks[1].spans == ((1.0, 1.4), (1.4, 1.8))  # cut off when the device stopped
    assert tasks[1].rows == (1, 0)
