"""Progressive training, elastic batches and the small network: laws in the simulator."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from pliant.data import Iid, ImageDataset, InputScale, resize
from pliant.data.federated import TrainTestData
from pliant.devices import ChangingTrace, ConstantTrace, Fleet
from pliant.engine.evaluation import Evaluation, evaluate
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_trained_params, read_records
from pliant.engine.simulate import simulate
from pliant.engine.worker_context import build_context
from pliant.methods import (
    Coherent,
    ElasticBatch,
    FedAvg,
    FedProx,
    LocalTraining,
    Progressive,
    ServerSgd,
    SmallNetwork,
    Stage,
)
from pliant.methods.base import Step, Task, TaskKey, Update
from pliant.nn.elastic import elastic
from pliant.nn.frozen_cost import group_params
from pliant.nn.growth import silence_filters
from pliant.nn.models import cifar_cnn, digits_cnn_bn
from pliant.nn.optimisers import Sgd
from pliant.nn.pareto_table import ParetoTable
from pliant.params import get_params
from pliant.table_search import StepTimeModel
from pliant.workers.pool import InlineWorkers, ProcessWorkers

LOCAL = LocalTraining(Sgd(lr=0.05, clip=5.0), batch=8, epochs=4)
RAMP = (Stage(0.3, side=8), Stage(0.6, side=12), Stage())
WIDTHS = (Stage(0.5, width=0.5), Stage())


def make_images(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=rng, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 3 * labels] += 127
    return ImageDataset.from_tensors(pixels, labels, classes=4)


DATA = TrainTestData(make_images(6 * 24 + 20), make_images(40, seed=1)).share(Iid(), 6, proxy=20)


def make_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cifar_cnn(4, filters=(4, 6, 8), channels=1)


FULL_MACS = elastic(make_network(), torch.zeros(1, 1, 16, 16)).macs(0.0, training=True)
ONE_PASS = 24 * FULL_MACS  # of one device's images


def make_fleet(speed):
    trace = speed if not isinstance(speed, float) else ConstantTrace(speed)
    return Fleet(size=6, speed=trace, macs_per_second=ONE_PASS)


CHANGING = make_fleet(ChangingTrace(low=0.3, high=1.0, per_round=2.0))


def run(method, fleet=CHANGING, *, folder=None, stop=None, workers=None, late="partial", **changes):
    settings = RunSettings(
        rounds=4,
        per_round=3,
        rules=RoundRules(late=late, grace=0.0),
        evaluation=Evaluation(every=2),
        checkpoint_every=1,
    )
    records = []
    for record in simulate(
        method,
        make_network(),
        DATA,
        fleet,
        settings=msgspec.structs.replace(settings, **changes),
        workers=workers or InlineWorkers(),
        folder=folder,
        is_stopped=lambda: stop is not None and len(records) + 1 >= stop,
    ):
        records.append(record)
    return records


def list_tasks(folder):
    return [record for record in read_records(folder) if hasattr(record, "device")]


# progressive


def test_full_steps_from_the_start_are_partial_work():
    progressive, partial = run(Progressive((Stage(),), LOCAL)), run(FedProx(0.0, LOCAL))
    assert progressive[-1].digest == partial[-1].digest
    assert [r.useful for r in progressive] == [r.useful for r in partial]


def test_a_fixed_width_is_coherent_dropout_with_unscaled_prefixes():
    net = elastic(make_network(), torch.zeros(1, 1, 16, 16))
    rates = (0.5,) * len(net.sites)
    table = ParetoTable(net.fingerprint, (rates,), (net.macs(0.5, training=True) / FULL_MACS,))
    coherent = Coherent(table, LOCAL, filters="prefix", scaled=False)
    progressive = Progressive((Stage(width=0.5),), LOCAL, merging="counts")
    assert [r.useful for r in run(progressive)] == [r.useful for r in run(coherent)]
    trained = [r.trained_score or r.score for r in (run(progressive)[-1], run(coherent)[-1])]
    assert trained[0] == trained[1]


def test_devices_fill_the_round_with_cheap_steps(tmp_path):
    net = elastic(make_network(), torch.zeros(1, 1, 16, 16))
    run(Progressive(RAMP, LOCAL), make_fleet(0.7), folder=tmp_path)
    for task in list_tasks(tmp_path):
        stage = sum(task.round / 4 >= end for end in (0.3, 0.6))
        side = (8, 12, 16)[stage]
        share = net.at(side, side).macs(0.0, training=True) / FULL_MACS
        expected = min(int(0.7 * 3 / share + 1e-9), 12)  # three mini-batches a pass, four passes
        assert (task.steps, set(task.rows)) == (expected, {stage})
        np.testing.assert_allclose(task.useful, task.steps * 8 * FULL_MACS * share)


def test_speed_one_is_one_pass_if_the_fleet_does_not_say(tmp_path):
    fleet = Fleet(size=6, speed=ConstantTrace(0.7))
    run(Progressive((Stage(),), LOCAL), fleet, folder=tmp_path, rounds=1)
    assert {task.steps for task in list_tasks(tmp_path)} == {2}  # of three in a pass, not of twelve


def test_realised_macs_are_those_of_the_network_at_that_size():
    context = build_context(make_network(), DATA, Progressive(RAMP, LOCAL))
    key = TaskKey(0, 0, 0)
    for row, side in enumerate((8, 12, 16)):
        counter = FlopCounterMode(display=False)
        with counter:
            make_network()(torch.rand(8, 1, side, side)).sum().backward()
        assert 2 * context.batch_macs(row, 8, key, 0) == counter.get_total_flops()


def test_a_run_killed_within_the_ramp_resumes_bit_for_bit(tmp_path):
    method = Progressive(RAMP, LOCAL, patience=1, min_drop=0.3, server=ServerSgd(momentum=0.5))
    uninterrupted = run(method)
    for stop in (1, 2, 3):
        run(method, folder=tmp_path / str(stop), stop=stop)
        rest = run(method, folder=tmp_path / str(stop))
        assert [record.round for record in rest] == [*range(stop, 4)]
        assert rest[-1].digest == uninterrupted[-1].digest


def test_a_run_with_stages_does_not_continue_with_more_rounds(tmp_path):
    run(Progressive(RAMP, LOCAL), folder=tmp_path)
    with pytest.raises(ValueError, match=r"rounds.*the stages of the method are shares of it"):
        run(Progressive(RAMP, LOCAL), folder=tmp_path, rounds=5)


def test_worker_processes_give_the_same_result():
    method = Progressive((Stage(0.5, side=9, width=0.6), Stage()), LOCAL, adapts=True)
    assert run(method, workers=ProcessWorkers(2))[-1].digest == run(method)[-1].digest


def test_a_slow_device_uses_cheaper_steps_if_it_adapts(tmp_path):
    fleet = make_fleet(0.6)
    run(Progressive(RAMP, LOCAL, adapts=True), fleet, folder=tmp_path)
    rows = {task.round: set(task.rows) for task in list_tasks(tmp_path)}
    assert rows[0] == {0}
    assert rows[3] == {1}  # at .6 of the speed, 12 pixels fit and 16 do not


@pytest.mark.parametrize("speed", [0.4, 0.55, 1.0])
def test_a_device_that_would_lose_late_work_stops_in_time(speed, tmp_path):
    run(Progressive(RAMP, LOCAL), make_fleet(speed), folder=tmp_path, late="discard")
    tasks = list_tasks(tmp_path)
    assert {task.outcome for task in tasks} == {"finished"}
    net = elastic(make_network(), torch.zeros(1, 1, 16, 16))
    for task in tasks:
        side = (8, 12, 16)[task.rows[0]]
        share = net.at(side, side).macs(0.0, training=True) / FULL_MACS
        assert task.steps == min(int(speed * 3 / share + 1e-9), 12)


def test_evaluation_is_at_full_size_and_at_the_size_trained(tmp_path):
    records = run(Progressive((Stage(0.8, side=8), Stage()), LOCAL), folder=tmp_path)
    assert [record.side for record in records] == [8, 8, 8, 8]
    module, params = make_network(), load_trained_params(tmp_path)
    assert records[-1].score == evaluate(module, params, DATA, Evaluation())
    assert records[-1].trained_score == evaluate(module, params, DATA, Evaluation(), 8)
    small = TrainTestData(DATA.train, DATA.test)
    assert resize(small.test.get_normalised(slice(0, 2)), 8).shape == (2, 1, 8, 8)
    full = run(Progressive((Stage(),), LOCAL))
    assert [(r.side, r.trained_score) for r in full] == [(None, None)] * 4


def test_new_filters_are_silent_until_they_join(tmp_path):
    records = run(Progressive(WIDTHS, LOCAL), folder=tmp_path, stop=2)
    params, module = load_trained_params(tmp_path), make_network()
    net = elastic(module, torch.zeros(1, 1, 16, 16))
    narrow = net.select_prefix(0.5)
    x = torch.rand(8, 1, 16, 16)
    expected = net.run(net.take(params, narrow), narrow, x)
    module.load_state_dict(params)
    torch.testing.assert_close(module.train()(x), expected, atol=1e-6, rtol=1e-6)
    assert records[-1].trained_score is None  # the full network computes the same
    last = run(Progressive(WIDTHS, LOCAL), folder=tmp_path)
    assert len(last) == 2
    grown = load_trained_params(tmp_path)
    assert all(grown[name].abs().sum(0).all() for name in grown if name.endswith("weight"))


@pytest.mark.parametrize("make", [make_network, lambda: digits_cnn_bn(4, hidden=8, side=16)])
def test_silenced_filters_do_not_count(make):
    module = make().train()
    net = elastic(module, torch.zeros(1, 1, 16, 16))
    subnet, params, x = net.select_prefix(0.4), get_params(module), torch.rand(8, 1, 16, 16)
    expected = net.run(net.take(params, subnet), subnet, x)
    module.load_state_dict(silence_filters(net, params, subnet))
    torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-6)


def test_frozen_layers_stay_as_they_are(tmp_path):
    run(Progressive((Stage(frozen=2),), LOCAL), folder=tmp_path)
    before, after = get_params(make_network()), load_trained_params(tmp_path)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    layers = group_params(elastic(make_network(), torch.zeros(1, 1, 16, 16)))
    trainable = {name for name, _ in make_network().named_parameters()}
    assert unchanged & trainable == layers[0] | layers[1]
    assert len(layers[0]) == len(layers[1]) == 3  # a convolution and its norm


def test_a_step_with_frozen_layers_is_that_of_plain_torch():
    net, rng = elastic(make_network(), torch.zeros(1, 1, 16, 16)), torch.Generator().manual_seed(3)
    batches = [(torch.rand(8, 1, 16, 16, generator=rng), torch.arange(8) % 4) for _ in range(3)]
    stages = (Stage(0.5, side=8, frozen=1), Stage(0.9, frozen=1), Stage())
    method = Progressive(stages, LocalTraining(Sgd(lr=0.05)))
    steps = [
        Step(x[:, :, :8, :8] if row == 0 else x, y, net.full, 1.0, row=row)
        for row, (x, y) in enumerate(batches)
    ]
    task = Task(TaskKey(0, 0, 0), get_params(net.module), lr=0.05)
    update = method.train(net, task, steps)
    module = make_network().train()
    frozen = [module.get_parameter(name) for name in group_params(net)[0]]
    for step in steps:
        for param in frozen:
            param.requires_grad_(step.row == 2)
        module.zero_grad()
        F.cross_entropy(module(step.x), step.y).backward()
        with torch.no_grad():
            for param in module.parameters():
                if param.grad is not None:
                    param -= 0.05 * param.grad
    for name, param in module.named_parameters():
        trained = task.params[name] + update.delta[name]
        torch.testing.assert_close(trained, param.detach(), atol=1e-6, rtol=1e-5)


def test_steps_with_frozen_layers_cost_what_they_compute(tmp_path):
    stages = (Stage(0.5, side=8, frozen=1), Stage(0.9, frozen=2), Stage())
    method = Progressive(stages, LOCAL)
    context = build_context(make_network(), DATA, method)
    macs = []
    for side, layers in ((8, 1), (16, 2), (16, 0)):
        module, counter = make_network(), FlopCounterMode(display=False)
        for name in frozenset().union(*group_params(context.net)[:layers]):
            module.get_parameter(name).requires_grad_(False)
        with counter:
            module(torch.rand(8, 1, side, side)).sum().backward()
        macs.append(counter.get_total_flops() / 2)
    assert [context.batch_macs(row, 8, TaskKey(0, 0, 0), 0) for row in range(3)] == macs
    assert macs[1] < 0.7 * macs[2]
    run(method, make_fleet(0.7), folder=tmp_path)
    for task in list_tasks(tmp_path):
        row = int(task.round >= 2)
        assert set(task.rows) == {row}
        assert task.useful == pytest.approx(task.steps * macs[row])
        assert task.steps == min(int(0.7 * 24 * FULL_MACS / macs[row] + 1e-9), 12)


def test_layers_may_freeze_after_full_steps(tmp_path):
    stages = (Stage(0.5), Stage(frozen=2))
    run(Progressive(stages, LOCAL), make_fleet(0.7), folder=tmp_path)
    first, second = ({t.steps for t in list_tasks(tmp_path) if t.round // 2 == n} for n in (0, 1))
    assert max(first) < min(second)
    message = "rising cost, as slow devices use earlier ones, got 1, 0"
    with pytest.raises(ValueError, match=message):
        run(Progressive(stages, LOCAL, adapts=True))


def test_frozen_layers_save_their_macs_in_the_time_of_a_step():
    model = StepTimeModel(start=0.0, per_mac=1e-9, per_byte=0.0, batch=8)
    by_bytes = StepTimeModel(start=1e-3, per_mac=0.0, per_byte=1e-9, batch=8)
    method = Progressive((Stage(0.9, frozen=1), Stage()), LOCAL)
    contexts = [build_context(make_network(), DATA, method, step_time=m) for m in (model, by_bytes)]
    share = contexts[0].step_macs(0, TaskKey(0, 0, 0), 0) / FULL_MACS
    np.testing.assert_allclose(contexts[0].slowness, [1, 1])
    np.testing.assert_allclose(contexts[1].slowness, [1 / share, 1])  # as long as full steps


def test_the_default_ramp_follows_the_network(caplog):
    pooled = build_context(make_network(), DATA, Progressive(local=LOCAL))
    assert [pooled.scale_inputs(row).side for row in range(3)] == [8, 12, None]
    caplog.set_level("INFO", "pliant")
    fixed = build_context(digits_cnn_bn(4, hidden=8, side=16), DATA, Progressive(local=LOCAL))
    assert [fixed.scale_inputs(row) for row in range(3)] == [InputScale()] * 3
    counts = [fixed.select_subnet(row, TaskKey(0, 0, 0), 0).counts for row in range(3)]
    assert counts == [(6, 12), (9, 18), (12, 24)]
    assert "grow in width, not in resolution" in caplog.text


def test_a_stage_ends_when_the_loss_stalls():
    method = Progressive((Stage(0.8, side=8), Stage()), LOCAL, patience=2, min_drop=0.1)
    net = elastic(make_network(), torch.zeros(1, 1, 16, 16))
    state = method.init_state(get_params(net.module))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.params.items()}
    stages = []
    for loss in (2.0, 1.8, 1.6, 1.4, 1.4, 1.35):  # means of two: 1.9, 1.7, 1.5, 1.4, 1.375
        update = Update(0, zeros, 8, 1, 1.0, loss)
        state = method.merge(net, state, [update])
        stages.append(method.limit_row(net, state, 0.1))
    assert stages == [0, 0, 0, 0, 0, 1]  # 1.375 > .9 · 1.5 = 1.35; 1.4 < .9 · 1.7
    assert len(state.losses) == 0
    assert method.limit_row(net, replace(state, stage=5), 0.1) == 1
    assert method.limit_row(net, method.init_state(state.params), 0.8) == 1  # on schedule


def test_frozen_layers_need_the_full_width():
    with pytest.raises(
        ValueError, match=r"a width of 1 with frozen layers, got 0.5 - at `\$.width`"
    ):
        Stage(width=0.5, frozen=1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Stage(0.5), Stage(0.5), Stage()), "rising `until`, the last 1, got 0.5, 0.5, 1"),
        ((Stage(0.5),), "rising `until`, the last 1, got 0.5"),
    ],
)
def test_stages_end_in_order_at_the_end_of_the_run(stages, message):
    with pytest.raises(ValueError, match=message):
        Progressive(stages)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Stage(0.5), Stage(side=8)), "stages of rising cost, got 1, 0.25"),
        ((Stage(0.5, side=3), Stage()), "cannot run at 3x3"),
        ((Stage(0.5, frozen=4), Stage()), "fewer than the 4 layers of the network to be frozen"),
    ],
)
def test_impossible_stages_are_refused_before_anything_is_written(stages, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(Progressive(stages, LOCAL), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# smaller mini-batches


def test_an_elastic_batch_at_full_speed_is_fedavg():
    local = LocalTraining(Sgd(lr=0.05), batch=10)  # the last mini-batch of a device is short
    fleet = make_fleet(1.0)
    elastic_batch = run(ElasticBatch(local, weighting="samples"), fleet, late="discard")
    assert elastic_batch[-1].digest == run(FedAvg(local), fleet, late="discard")[-1].digest


@pytest.mark.parametrize("speed", [0.55, 0.8])
def test_a_slow_device_takes_fewer_samples_in_the_same_number_of_steps(speed, tmp_path):
    method = ElasticBatch(LocalTraining(Sgd(lr=0.05), batch=8))
    run(method, make_fleet(speed), folder=tmp_path, late="discard")
    for task in list_tasks(tmp_path):
        assert (task.outcome, task.steps) == ("finished", 3)
        assert task.samples <= speed * 24 + 1e-9
        assert task.samples > speed * 24 - 3  # each step rounds down by less than one sample
        assert task.useful == task.samples * FULL_MACS


def test_the_learning_rate_follows_the_share_of_samples():
    local = LocalTraining(Sgd(lr=1.0), batch=8)
    context = build_context(make_network(), DATA, ElasticBatch(local, power=1.0))
    params = get_params(context.net.module)
    x, y = torch.rand(4, 1, 16, 16), torch.arange(4)
    task = Task(TaskKey(0, 0, 0), params, lr=0.4)
    step = Step(x, y, context.net.full, 1.0, InputScale(batch=0.5))
    update = context.train(task, [step])
    plain = FedAvg(local)
    expected = build_context(make_network(), DATA, plain).train(
        Task(TaskKey(0, 0, 0), params, lr=0.2), [Step(x, y, context.net.full, 1.0)]
    )
    assert all(torch.equal(update.delta[name], expected.delta[name]) for name in params)


def test_no_mini_batch_is_too_small_for_batch_norm():
    assert min(ElasticBatch(LocalTraining(batch=32), least=0.01).shares) == 4 / 32
    assert ElasticBatch(LocalTraining(batch=2)).shares == (1.0,)


# the small network


def test_the_small_network_is_fedavg_of_a_narrow_one(tmp_path):
    local = LocalTraining(Sgd(lr=0.05), batch=8)
    records = run(SmallNetwork(local, width=0.5), make_fleet(1.0), folder=tmp_path)
    net = elastic(make_network(), torch.zeros(1, 1, 16, 16))
    narrow = net.select_prefix(0.5)
    small = cifar_cnn(4, filters=(2, 3, 4), channels=1)
    small.load_state_dict(net.take(get_params(net.module), narrow))
    settings = RunSettings(rounds=4, per_round=3, rules=RoundRules(late="partial", grace=0.0))
    fleet = make_fleet(1.0)
    *_, last = simulate(FedAvg(local), small, DATA, fleet, settings=settings)
    assert (last.macs, last.down) == (records[-1].macs, records[-1].down)
    assert last.score == records[-1].score
