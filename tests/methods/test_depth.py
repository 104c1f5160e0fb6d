"""DepthFL and ProgFed: what is trained, merged, charged and scored, and when they are FedAvg."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.methods.test_personal import LOCAL, make_data
from tests.methods.tiny_runs import make_state, make_update

from pliant.data import Iid
from pliant.data.federated import TrainTestData
from pliant.devices import ConstantTrace, DeviceClass, Fleet
from pliant.engine import round_loop
from pliant.engine.evaluation import evaluate, evaluate_per_device, measure_accuracy
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_trained_params, read_records
from pliant.engine.simulate import simulate
from pliant.methods import AnyMethod, DepthFl, FedAvg, FedBuff, ProgFed
from pliant.nn.elastic import elastic
from pliant.nn.exits import select_depth
from pliant.nn.models import exit_cnn
from pliant.value import decode, encode
from pliant.workers.pool import InlineWorkers, ProcessWorkers

BATCHES = [
    (torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(n)), torch.arange(4))
    for n in range(3)
]


def make_module(filters=(4, 6, 8)):
    torch.manual_seed(0)
    return exit_cnn(4, filters=filters, channels=1)


def make_net(filters=(4, 6, 8)):
    return elastic(make_module(filters), torch.rand(2, 1, 6, 6))


def make_common_data():
    images = make_data().train
    return TrainTestData(images, images).share(Iid(), 4, proxy=8)


def run(method, rounds=4, filters=(4, 6, 8), *, speed=1.0, late="wait", **options):
    settings = RunSettings(rounds=rounds, per_round=3, rules=RoundRules(late=late))
    fleet = Fleet(size=4, speed=ConstantTrace(speed))
    options = {"workers": InlineWorkers(), "data": make_common_data()} | options
    data = options.pop("data")
    return list(simulate(method, make_module(filters), data, fleet, settings=settings, **options))


def list_trained(delta):
    """Return the stages and exits that have moved."""
    return {".".join(name.split(".")[:2]) for name, tensor in delta.items() if tensor.any()}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_progfed_trains_the_first_stages_and_their_last_exit(depth):
    net, method = make_net(), ProgFed(LOCAL)
    update = make_update(method, net, make_state(net, method), 0, BATCHES, row=depth - 1)
    stages = {f"stages.{stage}" for stage in range(depth)}
    assert list_trained(update.delta) == {*stages, f"exits.{depth - 1}"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depthfl_trains_the_first_stages_and_all_their_exits(depth):
    net, method = make_net(), DepthFl(LOCAL)
    update = make_update(method, net, make_state(net, method), 0, BATCHES, row=depth - 1)
    parts = {f"{kind}.{stage}" for kind in ("stages", "exits") for stage in range(depth)}
    assert list_trained(update.delta) == parts
    assert update.extra["depth"] == depth


def test_the_exits_of_a_device_teach_one_another():
    net = make_net()

    def train_plainly(distilled):
        module = make_module().train()
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for x, y in BATCHES:
            value, outputs = x, []
            for stage, head in zip(module.stages, module.exits, strict=True):
                value = stage(value)
                outputs.append(head(value))
            loss = sum(F.cross_entropy(output, y) for output in outputs)
            for student in outputs if distilled else []:
                for teacher in outputs:
                    p, q = teacher.detach().softmax(1), student.softmax(1)
                    loss = loss + (p * (p / q).log()).sum() / len(y) / 2  # 0 of itself
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return module.state_dict()

    for distilled in (True, False):
        method = DepthFl(LOCAL, distilled=distilled)
        state = make_state(net, method)
        update = make_update(method, net, state, 0, BATCHES, row=2)
        trained = {name: state.params[name] + delta for name, delta in update.delta.items()}
        torch.testing.assert_close(trained, dict(train_plainly(distilled)), rtol=1e-4, atol=1e-5)


def test_each_layer_is_averaged_over_the_devices_that_trained_it():
    net, method = make_net(), DepthFl(LOCAL, weighting="equal")
    state = make_state(net, method)
    updates = [make_update(method, net, state, row, BATCHES, row=row) for row in range(3)]
    merged = method.merge(net, state, updates).params
    for name, tensor in merged.items():
        stage = int(name.split(".")[1])
        deltas = [update.delta[name].double() for update in updates[stage:]]
        expected = state.params[name].double() + sum(deltas) / len(deltas)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "filters"), [(ProgFed(LOCAL, growth=0.0), (4, 6, 8)), (DepthFl(LOCAL), (4,))]
)
def test_at_full_depth_it_is_fedavg(method, filters):
    grown, plain = (run(each, filters=filters)[-1] for each in (method, FedAvg(LOCAL)))
    assert grown.digest == plain.digest
    assert grown.macs == plain.macs


def test_stages_last_equally_long_until_growth_ends():
    net, method = make_net(), ProgFed(LOCAL, growth=0.5)
    state = make_state(net, method)
    rows = [method.limit_row(net, state, round / 12) for round in range(12)]
    assert rows == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    assert ProgFed(growth=0.0).limit_row(net, state, 0.0) == 2


@pytest.mark.parametrize("method", [ProgFed(LOCAL), DepthFl(LOCAL)])
def test_steps_cost_what_their_part_costs(method, tmp_path):
    run(method, folder=tmp_path, speed=0.6)
    net, data = make_net(), make_common_data()
    tasks = [record for record in read_records(tmp_path) if hasattr(record, "device")]
    assert len({task.rows[0] for task in tasks}) == (3 if isinstance(method, ProgFed) else 1)
    for task in tasks:
        row, samples = task.rows[0], data.sizes()[task.device]
        joint = isinstance(method, DepthFl) and row > 0
        part = select_depth(net, row + 1, all_exits=joint)
        assert task.macs == pytest.approx(samples * part.macs(part.full, training=True), rel=1e-12)


def test_slow_devices_train_fewer_stages_and_arrive_in_time():
    records = run(DepthFl(LOCAL), speed=0.5, late="discard")
    assert [record.merged for record in records] == [3] * 4
    assert [record.merged for record in run(FedAvg(LOCAL), speed=0.5, late="discard")] == [0] * 4


def test_a_growing_network_is_scored_at_its_depth(tmp_path):
    data = make_common_data()
    records = run(ProgFed(LOCAL, growth=1.0), rounds=3, folder=tmp_path, data=data)
    assert records[0].trained_score is not None
    assert records[1].trained_score != records[1].score
    assert records[2].trained_score is None  # at full depth
    params, net = load_trained_params(tmp_path), make_net()
    settings = RunSettings().evaluation
    assert evaluate(net.module, params, data, settings).accuracy == records[2].score.accuracy


def test_the_deepest_exit_that_was_trained_is_scored():
    net, data, method = make_net(), make_common_data(), DepthFl(LOCAL)
    state = method.merge(net, make_state(net, method), [])
    assert method.select_trained(net, state, None) is select_depth(net, 1)
    updates = [make_update(method, net, state, row, BATCHES, row=row) for row in (1, 0)]
    deeper = method.merge(net, state, updates)
    assert method.select_trained(net, deeper, None) is select_depth(net, 2)
    shallow = [make_update(method, net, deeper, 0, BATCHES, row=0)]
    assert method.merge(net, deeper, shallow).depth == 2
    records = run(method, speed=0.99, data=data)  # too slow for all exits
    assert all(record.trained_score is not None for record in records)
    assert records[-1].trained_score.accuracy > records[-1].score.accuracy


def test_a_device_uses_its_own_depth(monkeypatch):
    calls = []

    def evaluate_and_keep(*arguments):
        calls.append(arguments)
        return evaluate_per_device(*arguments)

    monkeypatch.setattr(round_loop, "evaluate_per_device", evaluate_and_keep)
    speeds = [DeviceClass(f"{speed}", speed=ConstantTrace(speed)) for speed in (0.2, 2.0)]
    settings = RunSettings(rounds=1, per_round=4, rules=RoundRules(late="wait"))
    fleet, data, net = Fleet(size=4, classes=tuple(speeds)), make_data(), make_net()
    arguments = (DepthFl(LOCAL), make_module(), data, fleet)
    (record,) = simulate(*arguments, settings=settings, workers=InlineWorkers())
    _, shared, trained, *_ = calls[0]
    depths = [(1, 3)[index] for index in fleet.get_class_indices(np.arange(4))]
    assert set(depths) == {1, 3}
    how = settings.evaluation
    for device, depth in enumerate(depths):
        own = select_depth(net, depth).module
        expected = measure_accuracy(own, shared | trained[device], data, device, how)
        assert record.personal.after_training[device] == expected


@pytest.mark.parametrize("method", [ProgFed(LOCAL), DepthFl(LOCAL)])
def test_two_workers_give_the_same_network(method):
    digests = {run(method, workers=w)[-1].digest for w in (InlineWorkers(), ProcessWorkers(2))}
    assert len(digests) == 1


@pytest.mark.parametrize("method", [ProgFed(LOCAL), DepthFl(LOCAL)])
def test_a_network_without_exits_is_refused(method, tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten())
    module.append(torch.nn.Linear(32, 4))
    with pytest.raises(ValueError, match="Expected a network with exits"):
        list(simulate(method, module, make_common_data(), Fleet(size=4), folder=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [ProgFed(LOCAL), FedBuff(DepthFl(LOCAL))])
def test_both_can_be_encoded_and_decoded(method):
    assert decode(encode(method), AnyMethod) == method
