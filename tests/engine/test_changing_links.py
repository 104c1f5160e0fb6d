"""Rounds over links whose rate changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.small_runs import FEDAVG, LOCAL, run

from pliant.devices import (
    FULL_NETWORK,
    ChangingTrace,
    ConstantTrace,
    CostRows,
    DeviceClass,
    Fleet,
    PerBatch,
    PerRound,
    SteppedTrace,
)
from pliant.engine.ledger import verify_records
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules, TaskOutcome, sample_dropout_times
from pliant.engine.round_tasks import make_tasks
from pliant.engine.run_store import read_records
from pliant.engine.split_virtual import VirtualEnvironment
from pliant.engine.timetable import build_timetable, compute_start_status
from pliant.methods import Distreal, FedDropout

DEVICE = np.array([0])


def make_fleet(up=None, down=None, *, speed=1.0, length=10.0, latency=0.0):
    link = DeviceClass(up=up, down=down, latency=latency)
    return Fleet(
        size=1,
        speed=ConstantTrace(speed),
        classes=(link,),
        round_seconds=length,
        macs_per_second=10.0,
    )


def make_round(fleet, steps=2, down=0.0, up=0.0, policy=FULL_NETWORK, **rules):
    tasks = make_tasks(DEVICE, steps, 10.0, down_bytes=down, up_bytes=up)
    return build_timetable(fleet, policy, tasks, RoundRules(grace=0.0, **rules))


def test_a_round_over_changing_links_takes_hand_sized_times():
    down = SteppedTrace(times=(0.0, 1.0), speeds=(100.0, 50.0))
    up = SteppedTrace(times=(0.0, 5.0, 6.0), speeds=(40.0, 0.0, 20.0))
    # down: 0.5 s latency, 50 bytes in 0.5 s, 50 bytes in 1 s; two steps of 1 s; up: 40 bytes in
    # 1 s, a pause, 20 bytes in 1 s, 0.5 s latency
    table = make_round(make_fleet(up, down, latency=0.5), down=100.0, up=60.0)
    assert table.start.tolist() == [[2.0, 3.0]]
    assert table.arrival.tolist() == [7.5]
    assert TaskOutcome(table.outcomes[0]) == TaskOutcome.FINISHED
    assert (table.down[0], table.up[0]) == (100.0, 60.0)


def test_a_device_that_leaves_has_received_what_came_until_then():
    down = SteppedTrace(times=(0.0, 1.0, 2.0), speeds=(100.0, 0.0, 50.0))
    fleet = make_fleet(down=down)
    rules, tasks = RoundRules(dropout=1.0), make_tasks(DEVICE, 2, 10.0, down_bytes=300.0)
    for seed in range(8):
        options = {"seed": seed, "round": 0}
        left_at = sample_dropout_times(rules, DEVICE, round_seconds=10.0, **options)[0]
        table = build_timetable(fleet, FULL_NETWORK, tasks, rules, **options)
        received = min(100 * left_at, 100.0) + max(0.0, 50 * (left_at - 2))
        assert table.down.tolist() == [min(300.0, np.floor(received))]


def test_a_link_at_zero_until_the_deadline_makes_late_and_a_waiting_server_waits():
    up = SteppedTrace(times=(0.0, 1.0, 25.0), speeds=(10.0, 0.0, 10.0))
    table = make_round(make_fleet(up), up=10.0)
    assert TaskOutcome(table.outcomes[0]) == TaskOutcome.LATE
    table = make_round(make_fleet(up), up=10.0, late="wait")
    assert table.arrival.tolist() == [26.0]
    assert table.closed_at == 26.0
    down = SteppedTrace(times=(0.0, 25.0), speeds=(0.0, 10.0))
    table = make_round(make_fleet(down=down), down=10.0)
    assert (table.busy[0], table.down[0], table.spent[0]) == (0.0, 0.0, 0.0)
    table = make_round(make_fleet(down=down), down=10.0, late="wait")
    assert table.start.tolist() == [[26.0, 27.0]]


def test_partial_work_is_sent_in_time_to_arrive_at_the_deadline():
    # the last 10 bytes before the deadline leave from 7 to 8 s, so work stops at 7 s
    up = SteppedTrace(times=(0.0, 8.0), speeds=(10.0, 0.0))
    table = make_round(make_fleet(up), steps=12, up=10.0, late="partial")
    assert TaskOutcome(table.outcomes[0]) == TaskOutcome.PARTIAL
    assert table.used_steps.tolist() == [7]


def test_devices_plan_by_the_rate_of_the_moment():
    rows = CostRows(tuple(np.linspace(0.1, 1.0, 10).tolist()))
    # 20 steps of 1 s at full size, 10 s; the upload takes 5 s at first, and 1 s from 2 s on
    up = SteppedTrace(times=(0.0, 2.0), speeds=(10.0, 50.0))
    fleet = make_fleet(up)
    tasks = make_tasks(DEVICE, 20, 10.0, up_bytes=50.0)
    status = compute_start_status(fleet, tasks)
    assert status.link_seconds.tolist() == [5.0]
    assert PerRound(rows).choose(status).row.tolist() == [1]  # 5 s for 20 steps: 0.25
    table = build_timetable(fleet, PerBatch(rows, "as-written"), tasks)
    assert table.row[0, 0] == 1
    assert table.row[0, -1] == 3  # 9 s for 20 steps: 0.45
    dead = make_fleet(SteppedTrace(times=(0.0, 2.0), speeds=(0.0, 50.0)))
    choice = PerRound(rows).choose(compute_start_status(dead, tasks))
    assert (choice.row.tolist(), choice.is_short.tolist()) == ([0], [True])


RATES = st.sampled_from([0.0, 5.0, 20.0, 80.0])


@given(
    levels=st.lists(RATES, min_size=4, max_size=4),
    late=st.sampled_from(["discard", "partial", "wait"]),
    size=st.floats(1.0, 300.0),
)
def test_what_arrives_in_time_was_carried_by_the_link(levels, late, size):
    up = SteppedTrace(times=(0.0, 2.0, 4.0, 6.0), speeds=tuple(levels), period=12.0)
    fleet = make_fleet(up)
    table = make_round(fleet, steps=3, up=size, late=late)
    stop = table.busy
    if table.up[0]:
        links = fleet.compute_links(DEVICE, "up", 0.0, table.arrival[0] + 1)
        carried = links.transferred(stop, table.arrival)
        assert carried[0] >= size * (1 - 1e-7) - 1e-6 * max(levels)
    elif late == "discard":
        links = fleet.compute_links(DEVICE, "up", 0.0, 11.0)
        assert links.finish_time(np.array([3.0]), np.array([size]))[0] > 10.0 - 1e-6


@pytest.mark.parametrize("method", [FEDAVG, FedDropout(local=LOCAL), Distreal(local=LOCAL)])
def test_a_run_over_constant_traces_has_the_records_of_constant_links(method, tmp_path):
    def run_over(name, wrap):
        link = DeviceClass(up=wrap(3e4), down=wrap(7e4), latency=0.01, joules_per_byte=1e-6)
        fleet = Fleet(size=12, speed=ChangingTrace(0.4, 1.2, 2.0), classes=(link,))
        settings = RunSettings(rounds=2, per_round=4, rules=RoundRules(late="partial"))
        run(method, fleet=fleet, settings=settings, folder=tmp_path / name)
        return list(read_records(tmp_path / name))

    assert run_over("numbers", float) == run_over("traces", ConstantTrace)


@pytest.mark.parametrize("late", ["discard", "partial", "wait"])
def test_runs_over_changing_links_keep_their_ledger(late, tmp_path):
    trace = ChangingTrace(low=0.0, high=6e4, per_round=4.0)
    fleet = Fleet(size=12, classes=(DeviceClass(up=trace, down=trace, latency=0.01),))
    settings = RunSettings(rounds=3, per_round=6, rules=RoundRules(late=late, dropout=0.2))
    run(fleet=fleet, settings=settings, folder=tmp_path / "run")
    records = list(read_records(tmp_path / "run"))
    assert verify_records(records) == 3


def make_environment(**link):
    fleet = Fleet(size=2, classes=(DeviceClass(**link),), round_seconds=10.0, macs_per_second=10.0)
    return VirtualEnvironment(fleet, np.full(2, 100.0), RunSettings(), 0, 0.0)


def test_split_learning_sends_over_changing_links():
    up = SteppedTrace(times=(0.0, 1.0, 3.0), speeds=(10.0, 0.0, 5.0))
    down = SteppedTrace(times=(0.0, 50.0), speeds=(0.0, 10.0))
    environment = make_environment(up=up, down=down)
    assert environment.available_clients() == [0, 1]
    environment.upload(0, 20)  # 10 bytes by 1 s, and 10 more by 5 s
    assert environment.arrival[0] == 5.0
    environment.serve([0], 0.0)
    environment.download(0, 10)
    assert environment.now[0] == 51.0
    assert environment.slowdown(1, 10.0, 10) == 1.0
    environment.transfer([0], [1], {0: 10, 1: 10})  # up from 51 to 53 s
    assert environment.now[1] == 54.0


def test_split_learning_gives_up_on_a_dead_link_in_one_line():
    environment = make_environment(up=ConstantTrace(0.0))
    with pytest.raises(
        ValueError, match="20 bytes within 1024 rounds, got one that does not: up of device 1"
    ):
        environment.upload(1, 20)
