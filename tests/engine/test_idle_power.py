"""Joules of devices that wait for the others of their round."""

import numpy as np
import pytest
from tests.engine.small_runs import run

from pliant.devices import (
    FULL_NETWORK,
    ChangingTrace,
    CostRows,
    DeviceClass,
    Fleet,
    PerBatch,
    RecordedTrace,
)
from pliant.engine.ledger import TaskRecord
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules, TaskOutcome, sample_dropout_times
from pliant.engine.round_tasks import make_tasks
from pliant.engine.run_store import read_records
from pliant.engine.split_virtual import VirtualEnvironment
from pliant.engine.timetable import build_timetable

ROWS = CostRows((0.25, 0.5, 1.0))


@pytest.fixture
def fleet(tmp_path):
    """Three devices that do 10, 5 and 2 MAC/s, for rounds of 4 s."""
    path = tmp_path / "speeds.csv"
    path.write_text("device,seconds,speed\na,0,10\nb,0,5\nc,0,2\n")
    link = DeviceClass(up=10.0, down=10.0, latency=0.25, idle_watts=2.0)
    speed = RecordedTrace(str(path))
    return Fleet(size=3, speed=speed, classes=(link,), round_seconds=4.0, macs_per_second=1.0)


def make_round(fleet, **rules):
    tasks = make_tasks(np.arange(3), 1, 10.0, down_bytes=2.5, up_bytes=5.0)
    return build_timetable(fleet, FULL_NETWORK, tasks, RoundRules(grace=0.0, **rules))


def test_a_device_is_idle_from_its_arrival_until_the_round_closes(fleet):
    # all download for 0.5 s and upload for 0.75 s; in between they work for 1, 2 and 5 s
    table = make_round(fleet)
    assert table.idle.tolist() == [4 - 2.25, 4 - 3.25, pytest.approx(0.75)]  # gives up at 3.25 s
    table = make_round(fleet, late="wait")
    assert table.closed_at == 6.25
    assert table.idle.tolist() == [4.0, 3.0, 0.0]
    table = make_round(fleet, late="partial")
    assert table.idle.tolist()[:2] == [1.75, 0.75]


def test_a_device_that_leaves_is_idle_until_then(fleet):
    devices, rules = np.arange(3), RoundRules(dropout=0.9, grace=0.0)
    tasks = make_tasks(devices, 1, 10.0)  # done after 1, 2 and, too late, 5 s
    for seed in range(9):
        options = {"seed": seed, "round": 0}
        left_at = sample_dropout_times(rules, devices, round_seconds=4.0, **options)
        table = build_timetable(fleet, FULL_NETWORK, tasks, rules, **options)
        expected = np.maximum(np.minimum(left_at, 4.0) - [1.0, 2.0, 4.0], 0.0)
        assert table.idle == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("late", ["discard", "partial", "wait"])
@pytest.mark.parametrize("policy", [FULL_NETWORK, PerBatch(ROWS)])
def test_work_transfers_and_idling_fill_the_round_of_a_device_that_stays(policy, late):
    trace = ChangingTrace(low=0.2, high=1.5, per_round=3.0)
    link = DeviceClass(up=40.0, down=30.0, latency=0.01)
    fleet = Fleet(size=300, speed=trace, classes=(link,))
    tasks = make_tasks(np.arange(50), 4, 10.0, down_bytes=3.0, up_bytes=2.0)
    table = build_timetable(fleet, policy, tasks, RoundRules(late=late))
    is_used = np.isin(table.outcomes, (TaskOutcome.FINISHED, TaskOutcome.PARTIAL))
    filled = table.busy + table.idle + (0.01 + 3 / 30) + (0.01 + 2 / 40)
    assert is_used.any()
    assert filled[is_used] == pytest.approx(table.closed_at, rel=1e-7)


def test_idle_power_adds_to_the_joules_of_a_run_and_to_nothing_else(tmp_path):
    def run_with(name, **costs):
        fleet = Fleet(size=12, speed=ChangingTrace(0.4, 2.0, 2.0), classes=(DeviceClass(**costs),))
        run(fleet=fleet, settings=RunSettings(rounds=1, per_round=6), folder=tmp_path / name)
        return [r for r in read_records(tmp_path / name) if isinstance(r, TaskRecord)]

    plain, idle = run_with("plain"), run_with("idle", idle_watts=3.0)
    assert [task.joules for task in plain] == [0.0] * 6
    # without links a task is its work, which starts at once; a late one works until 1.03 s
    expected = [3 * (1.03 - task.seconds) for task in idle]
    assert {task.outcome for task in idle} == {"finished", "late"}
    assert [task.joules for task in idle] == pytest.approx(expected, abs=1e-7)
    assert [task.macs for task in idle] == [task.macs for task in plain]


def test_split_clients_are_idle_while_they_neither_work_nor_transfer():
    link = DeviceClass(up=10.0, down=10.0, latency=0.5, idle_watts=2.0)
    fleet = Fleet(size=2, classes=(link,), round_seconds=10.0, macs_per_second=10.0)
    clients = VirtualEnvironment(fleet, np.full(2, 100.0), RunSettings(), 0, 0.0, server_speed=10.0)
    clients.available_clients()
    assert clients.compute(0, 20.0, 4)  # until 2 s
    clients.upload(0, 10)  # sent by 3 s, arrives at 3.5 s
    clients.serve([0], 10.0)  # until 4.5 s
    clients.download(0, 10)  # until 6 s
    assert clients.compute(1, 10.0, 4)  # until 1 s
    first, second = clients.build_records(0)
    assert (first.exchange.waited, second.exchange.waited) == (4.0, 0.0)
    assert first.joules == 2.0 * 1.5  # from 3 s to 4.5 s
    assert second.joules == 2.0 * 5.0  # from 1 s to the end of the round
