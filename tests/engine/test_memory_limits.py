"""Devices train only rows whose steps fit in their memory."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.small_runs import FEDAVG, LOCAL, data, network, run

from pliant.data import Iid, ImageDataset, TrainTestData
from pliant.devices import (
    FULL_NETWORK,
    ChangingTrace,
    ConstantTrace,
    CostRows,
    DeviceClass,
    DeviceStatus,
    Fleet,
    PerBatch,
    PerRound,
    RowChoice,
)
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules, TaskOutcome
from pliant.engine.round_tasks import RoundTasks, make_tasks
from pliant.engine.run_store import read_records
from pliant.engine.split_loop import simulate_split
from pliant.engine.task_costs import find_fitting_rows
from pliant.engine.timetable import build_timetable, compute_start_status
from pliant.engine.worker_context import build_context
from pliant.methods import (
    Coherent,
    Distreal,
    Elfish,
    FedDropout,
    FedProx,
    FedRolex,
    Fjord,
    HeteroFl,
)
from pliant.methods.base import LocalTraining, TaskKey
from pliant.nn.models import lenet_small
from pliant.nn.optimisers import Adam
from pliant.split import VanillaSplit

ROWS = CostRows((0.25, 0.5, 0.75, 1.0))
DECLINED = "dropped: declined, no row fits in memory"
METHODS = {
    "fedavg": FEDAVG,
    "fedprox": FedProx(local=LocalTraining(batch=8, optimiser=Adam())),
    "distreal": Distreal(local=LOCAL, choice="bernoulli"),
    "distreal, rounded": Distreal(local=LOCAL, choice="rounded"),
    "distreal, blocks": Distreal(local=LOCAL, choice="blocks", budget="paced"),
    "distreal, one order": Distreal(local=LOCAL, filters="round", adapts=False),
    "coherent": Coherent(local=LOCAL),
    "heterofl": HeteroFl(local=LOCAL),
    "feddropout": FedDropout(local=LOCAL),
    "fedrolex": FedRolex(local=LOCAL),
    "fjord": Fjord(local=LOCAL),
    "fjord, distilled": Fjord(local=LOCAL, distilled=True),
    "fjord, dynamic": Fjord(local=LOCAL, dynamic=True),
    "elfish": Elfish(local=LOCAL),
}
FULL_METHODS = ("fedavg", "fedprox", "distreal")


def make_status(speed, fits, *, link_seconds_of=None):
    """Return the status of devices at the start of a round of one second and one mini-batch."""
    count = len(speed)
    ones = np.ones(count)
    return DeviceStatus(
        np.arange(count),
        0,
        np.zeros(count),
        np.array(speed),
        ones,
        1.0,
        ones,
        ones,
        ones,
        0.0,
        link_seconds_of,
        np.array(fits),
    )


@pytest.mark.parametrize(
    "policy", [PerBatch(ROWS), PerBatch(ROWS, "paced"), PerRound(ROWS)], ids=str
)
@pytest.mark.parametrize("sends_subnets", [False, True])
def test_the_largest_affordable_row_that_fits_is_chosen(policy, sends_subnets):
    fits = [
        [True, True, True, True],
        [True, True, False, False],
        [True, False, True, False],  # memory need not rise with the cost
        [True, False, True, False],
        [False, False, True, True],  # the smallest that fits costs more than the budget
    ]
    link_seconds_of = (lambda rows: np.zeros(len(rows))) if sends_subnets else None
    status = make_status([0.8, 0.8, 0.8, 0.6, 0.6], fits, link_seconds_of=link_seconds_of)
    choice = policy.choose(status)
    assert choice.row.tolist() == [2, 1, 2, 0, 2]
    assert choice.is_short.tolist() == [False, False, False, False, True]


@given(data=st.data(), sends_subnets=st.booleans())
def test_no_policy_chooses_a_row_over_memory_or_passes_a_larger_one_by(data, sends_subnets):
    count = data.draw(st.integers(1, 5))
    shares = sorted(data.draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)))
    rows = CostRows(tuple(shares))
    needs = np.array(data.draw(_matrix(count, len(shares), st.integers(1, 9))))
    fits = needs <= np.array(data.draw(_matrix(count, 1, st.integers(1, 9))))
    speed = data.draw(st.lists(st.floats(0.0, 2.0), min_size=count, max_size=count))
    sizes = np.array(data.draw(st.lists(st.floats(0.0, 0.3), min_size=6, max_size=6)))
    link_seconds_of = (lambda row: np.sort(sizes)[row]) if sends_subnets else None
    for policy in (PerBatch(rows), PerBatch(rows, "paced"), PerRound(rows)):
        options = {} if isinstance(policy, PerBatch) else {"link_seconds_of": link_seconds_of}
        choice = policy.choose(make_status(speed, fits, **options))
        limited = policy.choose(make_status(speed, np.ones_like(fits), **options)).row
        for device in np.flatnonzero(fits.any(axis=1)):
            row = choice.row[device]
            assert fits[device, row]
            affordable = [r for r in np.flatnonzero(fits[device]) if r <= limited[device]]
            assert row == (affordable[-1] if affordable else np.flatnonzero(fits[device])[0])


def _matrix(rows, columns, values):
    row = st.lists(values, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


def test_a_device_without_a_fitting_row_declines_at_once_and_is_not_waited_for():
    tasks = make_tasks(np.arange(3), 2, 10.0, down_bytes=5.0, up_bytes=5.0)
    fits = np.array([[True], [False], [True]])
    tasks = RoundTasks(tasks.devices, tasks.full_macs, tasks.down_bytes, tasks.up_bytes, fits)
    fleet = Fleet(size=3, speed=ConstantTrace(2.0))
    for late, closed_at in (("discard", 1.0), ("partial", 1.0), ("wait", 0.5)):
        table = build_timetable(fleet, FULL_NETWORK, tasks, RoundRules(late=late))
        finished, declined = TaskOutcome.FINISHED, TaskOutcome.DECLINED
        assert table.outcomes.tolist() == [finished, declined, finished]
        assert (table.devices.tolist(), table.closed_at) == ([0, 1, 2], closed_at)
        assert (table.spent[1], table.down[1], table.up[1], table.busy[1]) == (0, 0, 0, 0)
        assert table.row[1].tolist() == [-1, -1]
        assert np.isinf(table.start[1]).all()
        assert table.available.tolist() == [40.0 * closed_at] * 3
        assert table.used_steps.tolist() == [2, 0, 2]


def test_a_policy_that_ignores_memory_is_refused():
    class Largest:
        is_per_round = False

        def choose(self, status):
            return RowChoice(np.full(len(status.devices), 3), status.full_macs)

    tasks = make_tasks(np.array([7]), 2, 10.0)
    fits = np.array([[True, True, True, False]])
    tasks = RoundTasks(tasks.devices, tasks.full_macs, tasks.down_bytes, tasks.up_bytes, fits)
    with pytest.raises(ValueError, match="a row that fits in memory, got 3 on device 7"):
        build_timetable(Fleet(size=9), Largest(), tasks)


@pytest.fixture(scope="module")
def contexts():
    net, shares = network(), data()
    return {name: build_context(net, shares, method) for name, method in METHODS.items()}


def count_step_bytes(context, subnet, batch):
    """Count the bytes of a step on a subnet, by its own tensors."""
    net, optimiser = context.net, context.method.local.optimiser
    params = sum(n for name, n in net.count_entries(subnet).items() if name in net.trainable_names)
    slots = 2 + optimiser.num_state_tensors
    return 4 * (params * slots + net.count_activations(subnet) * batch)


@pytest.mark.parametrize(
    ("name", "share"),
    [(name, 0.6) for name in METHODS]
    + [(name, share) for name in (*FULL_METHODS, "heterofl") for share in (0.8, 1.0)],
)
def test_no_step_of_a_run_exceeds_the_memory(name, share, contexts, tmp_path):
    method, context = METHODS[name], contexts[name]
    full = count_step_bytes(context, context.net.full, 8)
    classes = (DeviceClass(memory=share * full), DeviceClass())
    fleet = Fleet(size=12, speed=ChangingTrace(0.3, 1.5, 2.0), classes=classes)
    settings = RunSettings(rounds=2, per_round=6, rules=RoundRules(late="partial"))
    run(method, fleet=fleet, settings=settings, folder=tmp_path / "run")
    records = list(read_records(tmp_path / "run"))
    assert verify_records(records) == 2
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    is_limited = fleet.get_class_indices(np.arange(12)) == 0
    limited = [task for task in tasks if is_limited[task.device]]
    assert limited
    for task in limited:
        for step, row in enumerate(task.rows):
            subnet = context.select_subnet(row, TaskKey(0, task.round, task.device), step)
            assert count_step_bytes(context, subnet, 8) <= share * full
    declines = {task.outcome == DECLINED for task in limited}
    assert declines == {name in FULL_METHODS and share < 1.0}
    others = [task for task in tasks if not is_limited[task.device]]
    assert all(task.outcome != DECLINED for task in others)


@pytest.mark.parametrize("name", ["fedavg", "distreal, rounded", "fjord", "feddropout"])
def test_memory_enough_for_all_rows_changes_nothing(name, tmp_path):
    def run_with(folder, memory):
        fleet = Fleet(
            size=12,
            speed=ChangingTrace(0.3, 1.5, 2.0),
            classes=(DeviceClass(memory=memory, up=5e4),),
        )
        settings = RunSettings(rounds=2, per_round=4, rules=RoundRules(late="partial"))
        run(METHODS[name], fleet=fleet, settings=settings, folder=tmp_path / folder)
        return list(read_records(tmp_path / folder))

    assert run_with("none", None) == run_with("plenty", 1e9)


def test_a_server_sends_a_subnet_that_fits(contexts):
    context = contexts["heterofl"]
    memory = context.memory_bounds.step_bytes(LOCAL.optimiser, np.array([8]))[0]
    devices = np.arange(4)
    for limit in memory.tolist():
        fleet = Fleet(size=12, speed=ConstantTrace(9.0), classes=(DeviceClass(memory=limit),))
        fits = find_fitting_rows(context, fleet.get_costs(devices), devices)
        tasks = make_tasks(devices, 3, 10.0)
        tasks = RoundTasks(devices, tasks.full_macs, tasks.down_bytes, tasks.up_bytes, fits)
        choice = context.budget_policy.choose(compute_start_status(fleet, tasks))
        assert choice.row.tolist() == [np.flatnonzero(memory <= limit)[-1]] * 4


def test_a_round_in_which_nobody_fits_merges_nothing_and_ends(tmp_path, caplog):
    fleet = Fleet(size=12, classes=(DeviceClass(memory=1000.0),))
    settings = RunSettings(rounds=3, per_round=4, rules=RoundRules(late="wait"))
    records = run(fleet=fleet, settings=settings, folder=tmp_path / "run")
    assert [record.outcomes for record in records] == [{"dropped": 4}] * 3
    assert [record.seconds for record in records] == [1.0, 2.0, 3.0]
    assert DECLINED in caplog.text


def test_split_methods_refuse_memory_limits():
    images = ImageDataset.from_tensors(torch.rand(24, 3, 32, 32), torch.arange(24) % 10)
    shares = TrainTestData(images, images).share(Iid(), devices=2, proxy=8)
    fleet = Fleet(size=2, classes=(DeviceClass(name="watch", memory=1e6),))
    with pytest.raises(ValueError, match=r"do not model it, got 1e\+06 bytes for 'watch'"):
        next(simulate_split(VanillaSplit(), lenet_small(), shares, fleet))
