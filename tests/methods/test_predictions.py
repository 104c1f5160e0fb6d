"""FedMD and Cronus: plain PyTorch as an oracle, laws, costs, and what is refused."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.methods.test_personal import LOCAL, make_cnn, make_data
from torch import nn

from pliant.devices import ConstantTrace, Fleet
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.build import check_deployable
from pliant.experiment.config import Experiment
from pliant.methods import AnyMethod, Cronus, FedMd
from pliant.methods.base import Step, Task, TaskKey, Update, train_locally
from pliant.methods.predictions import OwnNetwork, PredictionState
from pliant.methods.robust import Mean, Median, SpectralMean, TrimmedMean
from pliant.methods.state import init_server_state
from pliant.nn.elastic import elastic
from pliant.params import get_params
from pliant.rng import rng_stream
from pliant.value import decode, encode
from pliant.workers.pool import InlineWorkers, ProcessWorkers

FEDMD = FedMd(LOCAL, proxy_images=6, batch=4, lr=0.01)
CRONUS = Cronus(LOCAL, proxy_images=6, merging=Mean())


def run(method, rounds=3, data=None, net=None, **options):
    settings = RunSettings(rounds=rounds, per_round=4, rules=RoundRules(late="wait"))
    options = {"fleet": Fleet(size=4), "workers": InlineWorkers()} | options
    fleet = options.pop("fleet")
    net, data = net or make_cnn(), data or make_data()
    return list(simulate(method, net, data, fleet, settings=settings, **options))


def make_batches(device, round):
    rng = torch.Generator().manual_seed(10 * round + device)
    labels = [torch.randint(0, 4, (5,), generator=rng) for _ in range(3)]
    return [(torch.rand(5, 1, 6, 6, generator=rng), y) for y in labels]


def train_rounds(method, rounds, rows=(0, 0)):
    """Run rounds with one device per row; return the server's state and all networks."""
    net, data = elastic(make_cnn(), torch.zeros(1, 1, 6, 6)), make_data()
    context = WorkerContext(net, data, method)
    state, kept = init_server_state(method, get_params(net.module)), {}
    for round in range(rounds):
        updates = []
        for device, row in enumerate(rows):
            key, extra = TaskKey(0, round, device), context.broadcast(state)
            task = Task(key, {}, 0.1, extra=extra, device_state=kept.get(device))
            subnet = context.select_subnet(row, key, 0)
            steps = [Step(x, y, subnet, 1.0, row=row) for x, y in make_batches(device, round)]
            updates.append(context.train(task, steps))
        kept = {update.device: update.device_state for update in updates}
        state = context.merge(state, updates)
    return state, [kept[device].network for device in range(len(rows))]


def draw_images(draw):
    rows = np.sort(rng_stream(0, "proxy images", draw).choice(8, 6, replace=False))
    return make_data().proxy.get_normalised(torch.from_numpy(rows))


def train_plainly(rounds, learn, predict):
    """Train two plain modules; `learn` trains one on its own batches and on (images, labels)."""
    modules, labels = [make_cnn(), make_cnn()], None
    for round in range(rounds):
        for device, module in enumerate(modules):
            public = None if labels is None else (draw_images(round - 1), labels)
            learn(module, make_batches(device, round), public)
        with torch.no_grad():
            outputs = [predict(module(draw_images(round))) for module in modules]
        labels = torch.stack(outputs).mean(0)
    return labels, modules


def take_steps(optimiser, module, batches, compute_loss):
    for x, y in batches:
        optimiser.zero_grad()
        compute_loss(module(x), y).backward()
        optimiser.step()


def test_fedmd_does_what_plain_torch_does():
    def learn(module, batches, public):
        if public is not None:
            parts = zip(*(tensor.split(3) for tensor in public), strict=True)
            adam = torch.optim.Adam(module.parameters(), lr=0.01)
            take_steps(adam, module, parts, lambda out, y: (out - y).abs().mean())
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        take_steps(sgd, module, batches, F.cross_entropy)

    labels, modules = train_plainly(3, learn, lambda logits: logits)
    state, networks = train_rounds(FEDMD, 3)
    torch.testing.assert_close(state.labels, labels, rtol=1e-4, atol=1e-5)
    for network, module in zip(networks, modules, strict=True):
        torch.testing.assert_close(network, get_params(module), rtol=1e-4, atol=1e-5)


def test_cronus_does_what_plain_torch_does():
    method = Cronus(msgspec.structs.replace(LOCAL, batch=2), proxy_images=6, merging=Mean())

    def learn(module, batches, public):
        parts = [] if public is None else [*zip(*(t.split(2) for t in public), strict=True)]
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        for number, batch in enumerate(batches):  # three of both kinds
            take_steps(sgd, module, [batch, *parts[number : number + 1]], F.cross_entropy)

    labels, modules = train_plainly(3, learn, lambda logits: logits.softmax(1))
    state, networks = train_rounds(method, 3)
    torch.testing.assert_close(state.labels, labels, rtol=1e-4, atol=1e-5)
    for network, module in zip(networks, modules, strict=True):
        torch.testing.assert_close(network, get_params(module), rtol=1e-4, atol=1e-5)


def test_a_single_device_learns_nothing_from_its_own_logits():
    net, optimiser = elastic(make_cnn(), torch.zeros(1, 1, 6, 6)), LOCAL.optimiser
    own = get_params(net.module)
    for round in range(3):
        steps = [Step(x, y, net.full, 1.0) for x, y in make_batches(0, round)]
        update = train_locally(net, Task(TaskKey(0, round, 0), own, 0.1), steps, optimiser)
        own = {name: tensor + update.delta[name] for name, tensor in own.items()}
    network = train_rounds(FEDMD, 3, rows=(0,))[1][0]
    assert all(torch.equal(network[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("method", [FEDMD, CRONUS])
def test_labels_are_charged_and_networks_are_not_sent(method, tmp_path):
    run(method, folder=tmp_path)
    tasks = [record for record in read_records(tmp_path) if hasattr(record, "device")]
    labels = 6 * 4 * 4  # images, classes, bytes
    assert {task.up for task in tasks} == {labels}
    assert [task.down for task in tasks] == [8] * 4 + [labels + 8] * 8  # and the number of draws


@pytest.mark.parametrize("cost", ["realised", "expected"])
@pytest.mark.parametrize("method", [FEDMD, CRONUS])
def test_work_on_proxy_images_is_charged(method, cost, tmp_path):
    settings = RunSettings(rounds=3, per_round=4, rules=RoundRules(late="wait", cost=cost))
    fleet = Fleet(size=4, speed=ConstantTrace(1.0))
    list(simulate(method, make_cnn(), make_data(), fleet, settings=settings, folder=tmp_path))
    tasks = [record for record in read_records(tmp_path) if hasattr(record, "device")]
    sizes = make_data().sizes()
    # 4·4·9 · 4 + 64 · 8 + 8 · 4; the images need no gradient
    forward, step = 576 + 512 + 32, 2 * 576 + 3 * 512 + 3 * 32
    for task in tasks:
        learnt = step if task.round else 0
        assert task.macs == sizes[task.device] * step + 6 * (learnt + forward)
        speed = sizes[task.device] * step  # per second
        assert task.seconds == pytest.approx(task.macs / speed)


def test_devices_have_widths_in_turn():
    method = FedMd(LOCAL, widths=(1.0, 0.5), proxy_images=6)
    state, (narrow, wide) = train_rounds(method, 2, rows=(0, 1))
    initial = get_params(make_cnn())
    assert torch.equal(narrow["0.weight"][2:], initial["0.weight"][2:])
    assert not torch.equal(wide["0.weight"][2:], initial["0.weight"][2:])
    # what the absent filters compute is not read
    assert not narrow["3.weight"].view(8, 4, 16)[:, 2:].any()
    assert state.draws == 2


def test_a_narrow_network_computes_the_same_at_full_size():
    method, x = FedMd(LOCAL, widths=(0.5,), proxy_images=6), torch.rand(5, 1, 6, 6)
    network = train_rounds(method, 2, rows=(0,))[1][0]
    net = elastic(make_cnn(), torch.zeros(1, 1, 6, 6))
    narrow = net.select_prefix(0.5)
    at_full_size = torch.func.functional_call(make_cnn(), network, (x,))
    torch.testing.assert_close(net.run(net.take(network, narrow), narrow, x), at_full_size)


def make_label_update(device, labels):
    return Update(device, {}, 1, 1, 1.0, 0.0, extra={"labels": torch.tensor(labels)})


def test_fedmd_averages_logits_and_cronus_makes_probabilities():
    state = PredictionState({})
    updates = [make_label_update(0, [[3.0, 1.0]]), make_label_update(1, [[5.0, -1.0]])]
    assert FEDMD.merge(None, state, updates).labels.tolist() == [[4.0, 0.0]]
    medians = [make_label_update(n, [row]) for n, row in enumerate([[0.8, 0.2], [0.4, 0.2]])]
    merged = Cronus(merging=Median()).merge(None, state, medians)
    torch.testing.assert_close(merged.labels, torch.tensor([[0.75, 0.25]]))
    assert merged.draws == 1


def test_without_updates_labels_stay():
    state = PredictionState({}, torch.ones(2, 2), 3)
    assert FEDMD.merge(None, state, []) is state
    assert CRONUS.merge(None, state, []) is state


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), SpectralMean()])
def test_robust_rules_ignore_a_fifth_of_the_devices(rule):
    generator = torch.Generator().manual_seed(0)
    honest = torch.rand(8, 5, 3, generator=generator, dtype=torch.float64) / 10
    liars = torch.full((2, 5, 3), 1e3, dtype=torch.float64)
    merged = rule.merge_labels(torch.cat([liars, honest]))
    assert (merged >= 0).all()
    assert (merged <= 0.1).all()


def test_the_spectral_filter_leaves_out_whole_vectors():
    honest = torch.tensor([[0.5, 0.5], [0.4, 0.6], [0.6, 0.4], [0.5, 0.5]], dtype=torch.float64)
    far = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    labels = torch.cat([honest, far])[:, None]
    assert SpectralMean(0.2).merge_labels(labels).tolist() == [[0.5, 0.5]]
    mean = SpectralMean(0.0).merge_labels(labels)
    torch.testing.assert_close(mean, Mean().merge_labels(labels))


@pytest.mark.parametrize("method", [FEDMD, CRONUS])
def test_two_workers_give_the_same_networks(method):
    options = (InlineWorkers(), ProcessWorkers(2))
    first, second = (run(method, workers=workers) for workers in options)
    assert [record.personal for record in first] == [record.personal for record in second]


@pytest.mark.parametrize("method", [FEDMD, CRONUS])
def test_a_resumed_run_ends_as_an_uninterrupted_one(method, tmp_path):
    whole = run(method, 4)
    stops = iter([False, True])
    run(method, 4, folder=tmp_path, is_stopped=lambda: next(stops))
    rest = run(method, 4, folder=tmp_path)
    assert [r.personal for r in rest] == [r.personal for r in whole[-len(rest) :]]
    assert len(rest) == 2


def test_own_networks_are_scored():
    records = run(FEDMD, 3)
    for record in records:
        assert record.score is None
        assert record.personal.per_device == record.personal.after_training
    assert records[-1].personal.accuracy > 0.25  # chance


def test_networks_with_batch_norm_are_trained():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)]
    method = FedMd(LOCAL, widths=(0.5, 1.0), proxy_images=7, batch=3)  # parts of 3, 2 and 2
    records = run(method, net=nn.Sequential(*layers))
    assert records[-1].merged == 4


@pytest.mark.parametrize("method", [FEDMD, CRONUS])
def test_proxy_images_and_own_tests_are_required(method):
    data, name = make_data(), type(method).__name__
    few = replace(data, proxy=data.proxy.select([0, 1, 2]))
    with pytest.raises(ValueError, match=f"Expected at least 6 proxy images for {name}.*got 3"):
        run(method, data=few)
    with pytest.raises(ValueError, match=r"got none; set `data\.proxy`"):
        run(method, data=replace(data, proxy=data.proxy.select([])))
    with pytest.raises(ValueError, match=f"tests of their own for the devices of {name}"):
        run(method, data=replace(data, test_shares=()))


def test_no_widths_are_refused():
    with pytest.raises(ValueError, match=r"at `\$\.widths` of FedMd"):
        FedMd(widths=())


@pytest.mark.parametrize("method", [FEDMD, CRONUS, Cronus(merging=SpectralMean(0.3))])
def test_both_can_be_encoded_and_decoded(method):
    assert decode(encode(method), AnyMethod) == method


def test_a_device_keeps_what_it_trained():
    first, second = (train_rounds(FEDMD, rounds)[1][0] for rounds in (1, 2))
    assert not torch.equal(first["5.weight"], second["5.weight"])
    assert FEDMD.personalise({}, OwnNetwork(first)) is first


@pytest.mark.parametrize("method", [FEDMD, CRONUS])
def test_real_devices_cannot_run_it(method):
    experiment = decode({"method": encode(method), "fleet": {"size": 2}}, Experiment)
    name = type(method).__name__
    with pytest.raises(ValueError, match=f"Expected a method for real devices, got {name}"):
        check_deployable(experiment)
