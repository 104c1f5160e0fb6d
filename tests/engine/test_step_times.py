"""Virtual time that follows a model of step time instead of MACs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import replace as change
from tests.engine.small_runs import FLEET, LOCAL, SETTINGS, data, images, network, run

from pliant.data import Iid
from pliant.data.federated import TrainTestData
from pliant.devices import ConstantTrace, CostRows, Fleet, PerBatch, PerRound, RowChoice
from pliant.engine.ledger import TaskRecord
from pliant.engine.round_rules import RoundRules
from pliant.engine.round_tasks import make_tasks
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.engine.timetable import build_timetable
from pliant.methods import (
    Distreal,
    ElasticBatch,
    FedBuff,
    FedProx,
    Fjord,
    HeteroFl,
    LocalTraining,
    Progressive,
    SmallNetwork,
    Stage,
)
from pliant.nn.elastic import elastic
from pliant.nn.models import cifar_cnn
from pliant.table_search import StepTimeModel

PARTIAL = RoundRules(late="partial", grace=0.0)
BY_MACS = StepTimeModel(start=0.0, per_mac=1e-9, per_byte=0.0, batch=8)
TIMED_FLEET = change(FLEET, macs_per_second=5e7)  # about a pass per second
FIVES = LocalTraining(batch=5)  # into which the 75 images of one of four devices divide
MIXED = StepTimeModel(start=2e-4, per_mac=1e-9, per_byte=5e-9, batch=8)


def build_table(slowness, policy, late="partial", batches=4):
    """Build the timetable of one device at 40 MAC/s, whose full mini-batches take 10 MACs."""
    tasks = replace(make_tasks(np.array([0]), batches, 10.0), slowness=np.array(slowness))
    rules = RoundRules(late=late, grace=0.0)
    return build_timetable(Fleet(size=1, speed=ConstantTrace(1.0)), policy, tasks, rules)


def test_a_row_that_is_slow_for_its_macs_takes_that_much_longer():
    # half the MACs at 1.5 times their time: 0.1875 s each, so the sixth would end at 1.125 s
    table = build_table([1.5], PerBatch(CostRows((0.5,)), "unlimited"), batches=4)
    assert table.end.tolist() == [[0.1875, 0.375, 0.5625, 0.75]]
    assert table.useful.tolist() == [20.0]  # MACs stay as they are
    # 0.25 s are left, in which the device could do 10 MACs of the full network
    assert table.available.tolist() == [30.0]


def test_an_interrupted_step_is_charged_its_own_macs():
    # a step takes 0.375 s: two are done, and 0.25 s of the third, which are 5 of its 7.5 MACs
    table = build_table([2.0], PerBatch(CostRows((0.75,)), "unlimited"))
    assert table.used_steps.tolist() == [2]
    assert table.useful.tolist() == [15.0]
    assert table.spent == pytest.approx([20.0])
    assert table.available == pytest.approx([20.0])  # it was busy all the time


@pytest.mark.parametrize("policy", [PerBatch, PerRound])
def test_rows_fit_by_their_time(policy):
    rows = CostRows((0.25, 0.5, 1.0), times=(0.5, 0.7, 1.0))
    tasks = make_tasks(np.array([0]), 4, 10.0)
    for speed, row in ((0.6, 0), (0.7, 1), (0.99, 1), (1.0, 2)):
        fleet = Fleet(size=1, speed=ConstantTrace(speed), macs_per_second=40.0)
        table = build_timetable(fleet, policy(rows), tasks, PARTIAL)
        assert table.row[0, 0] == row
        assert table.planned[0, 0] == 10 * rows.shares[row]
    # without times, half of the MACs fit into half of the time
    by_cost = policy(CostRows(rows.shares))
    fleet = Fleet(size=1, speed=ConstantTrace(0.6), macs_per_second=40.0)
    assert build_timetable(fleet, by_cost, tasks, PARTIAL).row[0, 0] == 1


@pytest.mark.parametrize("late", ["partial", "discard"])
@pytest.mark.parametrize(
    "method",
    [
        FedProx(mu=0.0, local=LOCAL),
        HeteroFl(fine=True, local=LOCAL),
        Distreal(local=LOCAL, budget="paced", choice="bernoulli"),
        ElasticBatch(local=LOCAL),
        Progressive(local=LocalTraining(batch=8, epochs=4)),
        FedBuff(inner=FedProx(mu=0.0, local=LOCAL), buffer=2, concurrency=4),
    ],
    ids=lambda method: type(method).__name__,
)
def test_if_steps_take_time_in_proportion_to_macs_nothing_changes(method, late):
    settings = change(SETTINGS, rounds=3, rules=RoundRules(late=late))
    plain = run(method, fleet=TIMED_FLEET, settings=settings)
    timed = run(method, fleet=TIMED_FLEET, settings=change(settings, step_time=BY_MACS))
    assert plain[-1].digest == timed[-1].digest
    for before, after in zip(plain, timed, strict=True):
        assert after.seconds == pytest.approx(before.seconds)
        assert after.macs == pytest.approx(before.macs)
        assert after.available == pytest.approx(before.available)


def run_steps(tmp_path, method, net, federated, model):
    """Run devices as fast as the model's; return the row and the seconds of each whole step."""
    sample = federated.make_example()
    elastic_net = elastic(net, sample)
    full = model.batch * elastic_net.macs(elastic_net.full, training=True)
    speed = full / model.predict_seconds(elastic_net, elastic_net.full)
    fleet = Fleet(size=4, round_seconds=0.2, macs_per_second=speed)
    settings = change(SETTINGS, rounds=3, per_round=2, rules=PARTIAL, step_time=model)
    list(simulate(method, net, federated, fleet, settings=settings, folder=tmp_path))
    tasks = [record for record in read_records(tmp_path) if isinstance(record, TaskRecord)]
    steps = [
        (row, end - start)
        for task in tasks
        for row, start, end in zip(task.rows, task.starts, task.ends, strict=False)
    ]
    assert steps
    return elastic_net, steps


@pytest.mark.parametrize("width", [0.25, 0.5, 1.0])
def test_virtual_steps_take_the_seconds_of_the_model(tmp_path, width):
    method, model = SmallNetwork(width=width, local=FIVES), change(MIXED, batch=5)
    net, steps = run_steps(tmp_path, method, network(), data(4), model)
    expected = model.predict_seconds(net, net.select_prefix(1 - width))
    assert [seconds for _, seconds in steps] == pytest.approx([expected] * len(steps))


def test_steps_on_small_images_and_batches_take_the_seconds_of_the_model(tmp_path):
    part = images(72)
    pixels = torch.nn.functional.interpolate(part.pixels.float(), size=32).byte()
    wide = pixels.expand(-1, 3, -1, -1).contiguous()
    own = type(part).from_tensors(wide, part.labels, classes=5)
    federated = TrainTestData(own, own).share(Iid(), devices=4, proxy=8)
    stages = (Stage(until=0.3, side=16), Stage(until=0.6, side=24, batch=0.5), Stage())
    method = Progressive(stages=stages, local=LocalTraining(batch=8, epochs=2))
    model = StepTimeModel(start=1e-3, per_mac=1e-11, per_byte=2e-10, batch=8)
    net, steps = run_steps(tmp_path, method, cifar_cnn(5), federated, model)
    seconds = [
        model.predict_seconds(net, net.full, side=side, batch_share=share)
        for side, share in ((16, 1.0), (24, 0.5), (None, 1.0))
    ]
    assert {row for row, _ in steps} == {0, 1, 2}
    assert [took for _, took in steps] == pytest.approx([seconds[row] for row, _ in steps])


def test_small_mini_batches_pay_for_their_start(tmp_path):
    method, model = FedProx(mu=0.0, local=FIVES), change(MIXED, batch=10)
    net, steps = run_steps(tmp_path, method, network(), data(4), model)
    expected = model.predict_seconds(net, net.full, batch_share=0.5)
    assert [seconds for _, seconds in steps] == pytest.approx([expected] * len(steps))


def test_a_run_with_step_times_resumes_exactly(tmp_path):
    settings = change(SETTINGS, step_time=MIXED)
    method = Progressive(local=LocalTraining(batch=8, epochs=4))
    whole = run(method, fleet=TIMED_FLEET, settings=settings)
    options = {"fleet": TIMED_FLEET, "settings": settings, "folder": tmp_path}
    run(method, **options, is_stopped=lambda: True)
    rest = run(method, **options)
    assert len(rest) < len(whole)
    assert rest[-1].digest == whole[-1].digest
    with pytest.raises(ValueError, match="holds a run with"):
        run(method, fleet=TIMED_FLEET, settings=SETTINGS, folder=tmp_path)


def test_what_has_no_known_step_time_is_refused():
    settings = change(SETTINGS, step_time=MIXED)
    with pytest.raises(ValueError, match=r"Expected `fleet\.macs_per_second` with `step_time`"):
        run(FedProx(local=LOCAL), settings=settings)
    with pytest.raises(ValueError, match="Expected no `step_time` for Fjord"):
        run(Fjord(local=LOCAL), fleet=TIMED_FLEET, settings=settings)
    with pytest.raises(ValueError, match="got OwnPolicy"):
        run(OwnBudget(), fleet=TIMED_FLEET, settings=settings)


class OwnPolicy:
    is_per_round = False

    def choose(self, status):
        return RowChoice(np.zeros(len(status.devices), np.int64), status.full_macs)


class OwnBudget:
    local = LOCAL

    def make_budget_policy(self, net):
        return OwnPolicy()


def test_a_run_from_before_the_setting_resumes(tmp_path):
    run(folder=tmp_path, is_stopped=lambda: True)
    path = tmp_path / "inputs.json"
    inputs = json.loads(path.read_text())
    del inputs["settings"]["step_time"]
    path.write_text(json.dumps(inputs))
    assert run(folder=tmp_path)[-1].digest == run()[-1].digest


@pytest.mark.parametrize("changes", ["anytime", "batch"])
def test_open_passes_stop_before_a_slow_step_would_be_late(changes):
    # at 100 MAC/s, steps of 10 MACs take 0.15 s instead of 0.1: six fit, the seventh would be late
    tasks = make_tasks(np.array([0]), 12, 10.0)
    tasks = replace(tasks, slowness=np.array([1.5]), open_passes=2)
    fleet = Fleet(size=1, macs_per_second=100.0)
    rules = RoundRules(late="discard", grace=0.0, changes=changes)
    policy = PerBatch(CostRows((1.0,), times=(1.5,)), "unlimited")
    table = build_timetable(fleet, policy, tasks, rules)
    assert table.used_steps.tolist() == [6]
    assert table.arrival == pytest.approx([0.9])
    assert table.useful.tolist() == [60.0]


def test_a_slow_row_does_not_hide_a_faster_one():
    rows = CostRows((0.25, 0.5, 1.0), times=(0.9, 0.3, 1.0))
    assert rows.find_rows(np.array([0.2, 0.3, 0.95, 1.0])).tolist() == [0, 1, 1, 2]
