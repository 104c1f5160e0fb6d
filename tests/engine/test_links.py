"""What devices plan when the download and the upload take part of the round."""

from itertools import product

import numpy as np
import pytest
from tests.engine.small_runs import LOCAL, data, network, run

from pliant.devices import (
    ConstantTrace,
    CostRows,
    DeviceClass,
    FixedChoice,
    Fleet,
    PerBatch,
    PerRound,
    RowChoice,
)
from pliant.engine.ledger import TaskRecord
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules, TaskOutcome
from pliant.engine.round_tasks import make_tasks
from pliant.engine.run_store import read_records
from pliant.engine.timetable import build_timetable, compute_start_status
from pliant.engine.worker_context import build_context
from pliant.methods import Coherent, Distreal, FedDropout, FedRolex, Fjord, HeteroFl
from pliant.methods.base import TaskKey
from pliant.params import get_params, nbytes

ROWS = CostRows(tuple(np.linspace(0.1, 1.0, 10).tolist()))
STEPS, MACS = 3, 10.0
LENGTH = 2.0
DEVICE = np.array([0])
LAST_ROW = len(ROWS.shares) - 1
LATE_RULES = [RoundRules(late=late, grace=0.0) for late in ("discard", "partial", "wait")]


def sent_bytes(row, is_packed):
    """Return what is sent: all 100 bytes, or half of those that belong to the row and 10 more."""
    return 50.0 * ROWS.shares[row] + 10.0 if is_packed else 100.0


def make_linked_fleet(down, up, speed, latency=0.0):
    """Return a device that needs these shares of the round for 100 bytes down and up."""
    link = DeviceClass(
        down=100 / (down * LENGTH) if down else None,
        up=100 / (up * LENGTH) if up else None,
        latency=latency * LENGTH,
    )
    return Fleet(size=1, speed=ConstantTrace(speed), classes=(link,), round_seconds=LENGTH)


def make_linked_tasks(row, is_packed):
    size = sent_bytes(row, is_packed)
    return make_tasks(DEVICE, STEPS, MACS, down_bytes=size, up_bytes=size)


def run_row(fleet, row, is_packed, rules):
    """Build the timetable of a device that runs this row in all its steps."""
    tasks = make_linked_tasks(row, is_packed)
    status = compute_start_status(fleet, tasks)
    choice = RowChoice(np.array([row]), ROWS.share_array[[row]] * MACS)
    return build_timetable(fleet, FixedChoice(status, choice), tasks, rules)


def is_in_time(table):
    finished = table.outcomes[0] == TaskOutcome.FINISHED
    return bool(finished and table.arrival[0] <= LENGTH * (1 + 1e-8))


@pytest.mark.parametrize("rules", LATE_RULES, ids=lambda rules: rules.late)
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_largest_row_that_finishes_is_planned(is_packed, rules):
    planned_rows = set()
    for down, up, speed in product((0.0, 0.05, 0.2, 0.4), (0.0, 0.1, 0.4), (0.3, 0.55, 0.9, 1.2)):
        fleet = make_linked_fleet(down, up, speed, latency=0.01)
        status = compute_start_status(
            fleet,
            make_linked_tasks(9, is_packed),
            tasks_of=lambda rows: make_linked_tasks(rows[0], is_packed),
        )
        choice = PerRound(ROWS).choose(status)
        row = int(choice.row[0])
        finishes = is_in_time(run_row(fleet, row, is_packed, rules))
        assert choice.is_short.tolist() == [not finishes]
        assert finishes or row == 0
        if row < LAST_ROW:
            assert not is_in_time(run_row(fleet, row + 1, is_packed, rules))
        planned_rows.add(row)
    assert len(planned_rows) > 5


def test_a_subnet_that_travels_packed_leaves_time_for_more_macs():
    # 40 % of the round each way for all bytes, speed 0.9: if the whole network travelled, 0.2 of
    # the round would be left, for 0.1 of the MACs. Row r takes 2 · 0.4 · (0.5 r + 0.1) + r / 0.9 of
    # the round: 0.987 at r = 0.6, and 1.138 at r = 0.7.
    fleet = make_linked_fleet(0.4, 0.4, 0.9)
    status = compute_start_status(fleet, make_linked_tasks(9, is_packed=False))
    assert PerRound(ROWS).choose(status).row.tolist() == [0]
    status = compute_start_status(
        fleet,
        make_linked_tasks(9, is_packed=False),
        tasks_of=lambda rows: make_linked_tasks(rows[0], is_packed=True),
    )
    assert PerRound(ROWS).choose(status).row.tolist() == [5]


@pytest.mark.parametrize("rules", LATE_RULES, ids=lambda rules: rules.late)
@pytest.mark.parametrize("budget", ["as-written", "paced"])
def test_rows_chosen_per_mini_batch_leave_time_for_the_links(budget, rules):
    for down, up, speed in product((0.0, 0.05, 0.2, 0.4), (0.0, 0.1, 0.4), (0.55, 0.9, 1.2)):
        fleet = make_linked_fleet(down, up, speed)
        tasks = make_linked_tasks(9, is_packed=False)
        table = build_timetable(fleet, PerBatch(ROWS, budget), tasks, rules)
        first, last = table.row[0, 0], table.row[0, -1]
        assert is_in_time(table) or table.is_short.any()
        if first < LAST_ROW:
            assert not is_in_time(run_row(fleet, first + 1, False, rules))
        if budget == "paced" and 0 <= last < LAST_ROW:  # the last step has all the time left
            seconds = ROWS.shares[last + 1] * LENGTH / (speed * STEPS)
            assert table.start[0, -1] + seconds + up * LENGTH > LENGTH


METHODS = {
    "feddropout": FedDropout(local=LOCAL),
    "heterofl": HeteroFl(local=LOCAL),
    "fedrolex": FedRolex(local=LOCAL),
    "distreal, fixed": Distreal(local=LOCAL, filters="round", adapts=False),
}


def run_linked(method, share, speed, folder, late="discard"):
    """Run a round in which the whole network takes `share` of it each way; return the tasks."""
    size = nbytes(get_params(network()))
    link = DeviceClass(down=size / share, up=size / share)
    fleet = Fleet(size=12, speed=ConstantTrace(speed), classes=(link,))
    settings = RunSettings(rounds=1, per_round=4, rules=RoundRules(late=late, grace=0.0))
    run(method, fleet=fleet, settings=settings, folder=folder)
    return [record for record in read_records(folder) if isinstance(record, TaskRecord)]


def compute_round_share(context, method, task, row, share, speed):
    """Return the part of the round that download, training and upload of a row take."""
    params = get_params(context.net.module)
    key = TaskKey(0, 0, task.device)
    subnet = method.subnet_to_send(context.net, row, key)
    sent = nbytes(context.net.take(params, subnet))
    macs = context.net.macs(subnet, training=True) / context.full_macs
    return 2 * share * sent / nbytes(params) + macs / speed


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("name", METHODS)
def test_packed_methods_plan_for_the_subnet_that_is_sent(name, share, tmp_path):
    method, speed = METHODS[name], 0.9
    context = build_context(network(), data(), method)
    rows = len(context.budget_policy.rows.shares)
    for task in run_linked(method, share, speed, tmp_path):
        row = task.rows[0]
        assert task.outcome == "finished"
        assert compute_round_share(context, method, task, row, share, speed) <= 1 + 1e-9
        for larger in range(row + 1, rows):
            assert compute_round_share(context, method, task, larger, share, speed) > 1


def test_fjord_plans_for_the_mean_of_its_widths_and_the_widest_is_sent(tmp_path):
    method, share, speed = Fjord(local=LOCAL), 0.3, 0.9
    context = build_context(network(), data(), method)
    costs = context.budget_policy.rows.shares
    sizes = [
        nbytes(context.net.take(get_params(context.net.module), subnet))
        for subnet in (method.subnet_to_send(context.net, row, None) for row in range(len(costs)))
    ]
    fits = [
        row
        for row, (cost, size) in enumerate(zip(costs, sizes, strict=True))
        if 2 * share * size / sizes[-1] + cost / speed <= 1
    ]
    for task in run_linked(method, share, speed, tmp_path, late="wait"):
        assert task.rows[0] == fits[-1]
    assert 0 < fits[-1] < len(costs) - 1


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize(
    "method",
    [
        Coherent(local=LOCAL, budget="as-written"),
        Distreal(local=LOCAL, filters="round"),
        Fjord(local=LOCAL, dynamic=True),
    ],
    ids=["coherent", "distreal, one order per round", "fjord, dynamic"],
)
def test_nobody_who_plans_as_written_is_late_because_of_the_links(method, share, tmp_path):
    tasks = run_linked(method, share, 1.0, tmp_path)
    assert [task.outcome for task in tasks] == ["finished"] * 4
