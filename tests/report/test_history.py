"""What the records say, read straight from the JSON lines."""

import numpy as np
import pytest
from runs_on_disk import write_run

from pliant.report.history import Lake, load_history, load_tasks
from pliant.report.runs import load_runs


@pytest.fixture
def lake():
    opened = Lake()
    yield opened
    opened.close()


def history_of(lake, folder):
    (run,) = load_runs([folder])
    return load_history(lake, run)


def test_costs_add_up_over_rounds(lake, tmp_path):
    found = history_of(lake, write_run(tmp_path / "run", [0.1, None, 0.3], late={(1, 7)}))
    assert found.axis("rounds").tolist() == [1, 2, 3]
    assert found.axis("seconds").tolist() == [1, 2, 3]
    assert found.axis("macs").tolist() == [200, 400, 600]
    assert found.axis("bytes").tolist() == [3000, 6000, 9000]
    assert found.scored.tolist() == [True, False, True]
    assert found.accuracy == 0.3
    assert found.ends == {"finished": 5, "late": 1}


def test_a_record_cut_short_by_a_kill_is_left_out(lake, tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'{"type":"round","round":2,"seco')
    assert len(history_of(lake, folder)["round"]) == 2


def test_a_run_without_a_round_has_no_history(lake, tmp_path):
    folder = write_run(tmp_path / "run", [])
    (folder / "events.jsonl").write_bytes(b'{"type":"task","round":0}\n')
    assert history_of(lake, folder) is None


def test_devices_with_tests_of_their_own_count_by_their_mean(lake, tmp_path):
    folder = write_run(tmp_path / "run", [])
    line = b'{"type":"round","round":0,"seconds":1.0,"personal":{"each":[0.25,0.75]}}\n'
    (folder / "events.jsonl").write_bytes(line)
    found = history_of(lake, folder)
    assert found.accuracy == 0.5
    assert np.isnan(found["macs"][0])


@pytest.mark.parametrize("name", ["it's", "a*b", "[x]", "method=a,seed=0", "ü"])
def test_a_folder_may_have_any_name(lake, tmp_path, name):
    assert history_of(lake, write_run(tmp_path / name, [0.5])).accuracy == 0.5


def test_mini_batches_are_told_in_the_time_of_the_run(lake, tmp_path):
    found = history_of(lake, write_run(tmp_path / "run", [0.1, 0.2, 0.3], late={(1, 7)}))
    tasks = load_tasks(lake, found, 1, 1)
    assert [(one.round, one.device, one.end) for one in tasks] == [
        (1, 4, "finished"),
        (1, 7, "late"),
    ]
    assert tasks[0].spans == ((1.0, 1.4), (1.4, 1.8))
    assert tasks[1].spans == ((1.0, 1.4), (1.4, 1.8))  # cut off when the device stopped
    assert tasks[1].rows == (1, 0)
