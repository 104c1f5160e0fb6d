"""FedPer and Ditto: hand-computed steps, laws, and scores of each device's own network."""

import pytest
import torch
from tests.methods.tiny_runs import (
    PLAIN,
    get_weights,
    make_batch,
    make_net,
    make_state,
    make_update,
)
from torch import nn

from pliant.data import Dirichlet, ImageDataset
from pliant.data.federated import TrainTestData
from pliant.devices import ConstantTrace, Fleet
from pliant.engine.evaluation import measure_accuracy
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_trained_params, read_records
from pliant.engine.simulate import simulate
from pliant.methods import (
    Ditto,
    FedAvg,
    FedPer,
    HeteroFl,
    LocalTraining,
    MultiHead,
    Progressive,
    Stage,
)
from pliant.methods.ditto import PersonalNetwork
from pliant.methods.fedper import PersonalLayers
from pliant.nn.elastic import elastic
from pliant.nn.growth import silence_filters
from pliant.nn.models import exit_cnn
from pliant.nn.optimisers import Sgd
from pliant.params import get_params
from pliant.workers.pool import InlineWorkers

LOCAL = LocalTraining(Sgd(lr=0.1), batch=8)


def make_data(devices=4):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % 4
    images = torch.rand(160, 1, 6, 6, generator=generator) / 2
    for label in range(4):
        images[labels == label, 0, label] += 0.5
    images = ImageDataset.from_tensors(images, labels)
    shared = TrainTestData(images, images).share(Dirichlet(0.3), devices, proxy=8)
    return shared.hold_out_tests(0.25, seed=1)


def make_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)
    )


def make_deep_cnn():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def run(method, rounds=3, folder=None, data=None):
    settings = RunSettings(rounds=rounds, per_round=2, rules=RoundRules(late="wait"))
    return list(
        simulate(
            method,
            make_cnn(),
            data or make_data(),
            Fleet(size=4),
            settings=settings,
            workers=InlineWorkers(),
            folder=folder,
        )
    )


def test_a_device_trains_both_networks_of_ditto():
    net, method = make_net(), Ditto(PLAIN, prox=0.5)
    state = make_state(net, method)
    own = {**get_params(net.module), "0.weight": torch.tensor([1.0, 1.0]).view(2, 1, 1, 1)}
    update = make_update(
        method, net, state, 0, [make_batch(2), make_batch(0)], device_state=PersonalNetwork(own)
    )
    assert update.delta["0.weight"].flatten().tolist() == [1.0, -1.0]  # as FedAvg
    # equal logits: the gradient moves them by (1, -1), the term by 0.5 · (1 - 0) towards 0, then
    # with no gradient the weights halve
    assert update.device_state.network["0.weight"].flatten().tolist() == [0.75, -0.25]


def test_the_shared_network_of_ditto_is_that_of_fedavg():
    shared, plain = run(Ditto(LOCAL)), run(FedAvg(LOCAL))
    assert shared[-1].digest == plain[-1].digest
    assert shared[-1].macs == 2 * plain[-1].macs


def test_without_proximal_term_devices_of_ditto_train_alone():
    net, method = make_net(), Ditto(PLAIN, prox=0.0)
    state = make_state(net, method)
    first = make_update(method, net, state, 0, [make_batch(2)])
    second = make_update(method, net, state, 0, [make_batch(0)], device_state=first.device_state)
    alone = first.device_state.network["0.weight"]
    assert torch.equal(second.device_state.network["0.weight"], alone)


def test_fedper_keeps_personal_layers_out_of_the_shared_network():
    method, net = FedPer(PLAIN, personal=("0",)), make_net()
    state = make_state(net, method)
    kept = PersonalLayers({"0.weight": torch.tensor([1.0, 1.0]).view(2, 1, 1, 1)})
    update = make_update(method, net, state, 0, [make_batch(2)], device_state=kept)
    assert not update.delta["0.weight"].any()
    assert update.device_state.layers["0.weight"].flatten().tolist() == [2.0, 0.0]
    assert get_weights(method.merge(net, state, [update])) == [0.0, 0.0]


def test_unknown_layers_are_refused_before_a_folder_is_made(tmp_path):
    with pytest.raises(ValueError, match="Expected names of layers"):
        run(FedPer(LOCAL, personal=("fc",)), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fedper_shares_all_but_the_last_layer():
    net = elastic(make_cnn(), torch.zeros(1, 1, 6, 6))
    method = FedPer(LOCAL)
    state = make_state(net, method)
    x, y = torch.rand(4, 1, 6, 6), torch.arange(4)
    update = make_update(method, net, state, 0, [(x, y)])
    assert set(update.device_state.layers) == {"5.weight", "5.bias"}
    plain = make_update(FedAvg(LOCAL), net, state, 0, [(x, y)])
    for name, delta in plain.delta.items():
        is_personal = name.startswith("5.")
        assert torch.equal(update.delta[name], torch.zeros_like(delta) if is_personal else delta)
        if is_personal:
            kept = update.device_state.layers[name]
            assert torch.equal(kept, state.params[name] + delta)


def test_fedper_refuses_unknown_layers():
    with pytest.raises(ValueError, match=r"Expected names of layers \(0, 2\), got fc"):
        make_update(
            FedPer(PLAIN, personal=("fc",)),
            make_net(),
            make_state(make_net(), FedPer()),
            0,
            [make_batch(2)],
        )


def test_one_head_of_full_width_is_fedper():
    one = MultiHead(("3", "5"), LOCAL, widths=(1.0,))
    alike = FedPer(LOCAL, personal=("3", "5"))
    assert [r.personal for r in run(one)] == [r.personal for r in run(alike)]


@pytest.mark.parametrize(
    "method",
    [
        FedPer(LOCAL, personal=("0", "3", "5")),
        MultiHead(("0", "3", "5"), LOCAL, widths=(1.0,)),
    ],
)
def test_if_all_layers_are_personal_devices_train_alone(method):
    net, generator = elastic(make_cnn(), torch.zeros(1, 1, 6, 6)), torch.Generator().manual_seed(0)
    batches = [(torch.rand(4, 1, 6, 6, generator=generator), torch.arange(4)) for _ in range(4)]
    state, kept = make_state(net, method), {0: None, 1: None}
    alone = dict.fromkeys(kept, make_state(net, FedAvg(LOCAL)))
    for device, batch in [(0, batches[0]), (1, batches[1]), (0, batches[2]), (1, batches[3])]:
        update = make_update(method, net, state, device, [batch], device_state=kept[device])
        state, kept[device] = method.merge(net, state, [update]), update.device_state
        plain = make_update(FedAvg(LOCAL), net, alone[device], device, [batch])
        alone[device] = FedAvg(LOCAL).merge(net, alone[device], [plain])
    initial = get_params(net.module)
    assert all(torch.equal(state.params[name], tensor) for name, tensor in initial.items())
    for device, own in kept.items():
        torch.testing.assert_close(own.layers, alone[device].params)


def test_a_slow_device_trains_a_narrow_part_of_its_own_head():
    net = elastic(make_deep_cnn(), torch.zeros(1, 1, 6, 6))
    method = MultiHead(("2", "5"), LOCAL, widths=(0.5, 1.0))
    state = make_state(net, method)
    batch = (torch.rand(4, 1, 6, 6), torch.arange(4))
    narrow = make_update(method, net, state, 0, [batch], row=0)
    layers = narrow.device_state.layers
    changed = (layers["2.weight"] != state.params["2.weight"]).flatten(1).any(1)
    assert changed[:4].any()
    assert not changed[4:].any()
    assert all(not narrow.delta[name].any() for name in layers)
    assert narrow.delta["0.weight"].any()
    subnet = narrow.subnet_steps[0][0]
    assert subnet.counts == (4, 4)
    shares = method.make_budget_policy(net).rows.shares
    assert shares == (net.macs(subnet, training=True) / net.macs(net.full, training=True), 1.0)


def test_a_head_must_have_layers_to_narrow():
    net = elastic(make_cnn(), torch.zeros(1, 1, 6, 6))
    with pytest.raises(ValueError, match="can be narrowed in `head`, found none in 5"):
        MultiHead(("5",), LOCAL).make_budget_policy(net)
    with pytest.raises(ValueError, match="at least one width"):
        MultiHead(("5",), LOCAL, widths=())


def test_by_default_a_head_begins_at_the_last_site():
    net = elastic(make_deep_cnn(), torch.zeros(1, 1, 6, 6))
    batch = (torch.rand(4, 1, 6, 6), torch.arange(4))
    update = make_update(MultiHead(), net, make_state(net, MultiHead()), 0, [batch])
    assert set(update.device_state.layers) == {"2.weight", "2.bias", "5.weight", "5.bias"}


@pytest.mark.parametrize(
    "method", [FedPer(LOCAL), Ditto(LOCAL), MultiHead(("3", "5"), LOCAL, widths=(1.0,))]
)
def test_each_device_is_scored_with_its_own_network(method, tmp_path):
    data = make_data()
    records = run(method, data=data, folder=tmp_path / "run")
    after = records[-1].personal.after_training
    trained = {task.device for task in read_records(tmp_path / "run") if hasattr(task, "device")}
    assert {device for device, score in enumerate(after) if score is not None} == trained


def make_exits():
    torch.manual_seed(0)
    return exit_cnn(4, filters=(4, 8), channels=1)


@pytest.mark.parametrize(
    ("method", "side"),
    [
        (HeteroFl(LOCAL, s=0.5, levels=2), None),
        (Progressive((Stage(0.9, side=4), Stage()), LOCAL), 4),
    ],
)
def test_own_tests_use_the_part_of_the_network_that_is_trained(method, side, tmp_path):
    settings = RunSettings(rounds=3, per_round=4, rules=RoundRules(late="wait"))
    slow, data = Fleet(size=4, speed=ConstantTrace(0.5)), make_data()
    arguments = (method, make_exits(), data, slow)
    *_, last = simulate(*arguments, settings=settings, folder=tmp_path / "run")
    params, net = (
        load_trained_params(tmp_path / "run"),
        elastic(make_exits(), torch.rand(2, 1, 6, 6)),
    )
    used = params if side else silence_filters(net, params, net.select_prefix(0.5))

    def measure(params, side):
        how = settings.evaluation
        return [measure_accuracy(net.module, params, data, n, how, side) for n in range(4)]

    assert list(last.personal.per_device) == measure(used, side)
    assert measure(used, side) != measure(params, None)


def test_personal_networks_survive_a_restart(tmp_path):
    whole = run(Ditto(LOCAL), rounds=4)
    settings = RunSettings(rounds=4, per_round=2, rules=RoundRules(late="wait"))
    arguments = (Ditto(LOCAL), make_cnn(), make_data(), Fleet(size=4))
    stops = iter([False, True])
    options = {"settings": settings, "workers": InlineWorkers(), "folder": tmp_path / "run"}
    first = list(simulate(*arguments, **options, is_stopped=lambda: next(stops)))
    rest = list(simulate(*arguments, **options))
    assert len(first) == 2
    assert [r.personal for r in (*first, *rest)] == [r.personal for r in whole]


def test_tests_held_out_are_the_device_s_own_images():
    images = ImageDataset.from_tensors(torch.rand(40, 1, 2, 2), torch.arange(40) % 4)
    before = TrainTestData(images, images).share(Dirichlet(1.0), 4, proxy=4)
    data = before.hold_out_tests(0.25, seed=0)
    for device in range(4):
        held = data.test.get_normalised(torch.from_numpy(data.get_test_indices(device)))
        mine = before.train.get_normalised(torch.from_numpy(before.get_share(device)))
        left = data.train.get_normalised(torch.from_numpy(data.get_share(device)))
        assert len(held) == max(1, round(len(mine) / 4))
        assert sorted(map(repr, torch.cat([held, left]).tolist())) == sorted(
            map(repr, mine.tolist())
        )
    with pytest.raises(ValueError, match="expected no own tests yet"):
        data.hold_out_tests(0.25, seed=0)


def test_a_single_image_cannot_be_held_out():
    images = ImageDataset.from_tensors(torch.rand(5, 1, 2, 2), torch.arange(5) % 2)
    data = TrainTestData(images, images).share(Dirichlet(100.0), 4, proxy=0)
    with pytest.raises(ValueError, match="at least 2 images on every device to hold out tests"):
        data.hold_out_tests(0.5, seed=0)
