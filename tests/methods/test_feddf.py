"""FedDF: the laws of distillation, and the inner method's verbs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.methods.test_personal import LOCAL, make_cnn, make_data
from torch import nn

from pliant.analysis.runs import group_runs, load_runs
from pliant.analysis.summary import summarise_groups
from pliant.devices import ConstantTrace, Fleet
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.methods import FedAvg, FedDf, HeteroFl, Scaffold
from pliant.methods.base import Update
from pliant.methods.feddf import _make_distillation_loss, _make_teacher
from pliant.methods.verbs import HasBudgetPolicy, SendsSubnets
from pliant.nn.elastic import elastic
from pliant.params import get_params
from pliant.rng import rng_stream
from pliant.value import decode, encode
from pliant.workers.pool import InlineWorkers, ProcessWorkers


def run(method, folder=None, **options):
    settings = RunSettings(rounds=3, per_round=3, rules=RoundRules(late="wait"))
    options = {"fleet": Fleet(size=4), "workers": InlineWorkers()} | options
    fleet = options.pop("fleet")
    data = options.pop("data", None) or make_data()
    return list(
        simulate(method, make_cnn(), data, fleet, settings=settings, folder=folder, **options)
    )


def distil(method, net, merged, updates, images=None):
    images = images or make_data().proxy
    before = {name: tensor.clone() for name, tensor in get_params(net.module).items()}
    rng = rng_stream(0, "distil", 0)
    return method.distil(net, before, merged, updates, images, rng)


def make_network():
    """A network with batch norm, as its statistics must not make a difference."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)]
    return elastic(nn.Sequential(*layers), torch.rand(1, 1, 6, 6))


def make_update(device, delta):
    return Update(device, delta, samples=8, steps=1, macs=1.0, loss=0.0)


def test_a_teacher_equal_to_the_student_changes_nothing():
    net = make_network()
    params = get_params(net.module)
    delta = {n: torch.rand_like(t) / 8 for n, t in params.items() if t.is_floating_point()}
    delta |= {n: torch.zeros_like(t) for n, t in params.items() if n not in delta}
    merged = {name: tensor + delta[name] for name, tensor in params.items()}
    result = distil(FedDf(steps=5), net, merged, [make_update(0, delta)])
    for name in net.trainable_names:
        assert torch.equal(result[name], merged[name])


def test_the_student_learns_what_the_teachers_say():
    net = elastic(make_cnn(), torch.zeros(1, 1, 6, 6))
    params, images = get_params(net.module), make_data().proxy
    torch.manual_seed(1)
    deltas = [{n: torch.randn_like(t) / 4 for n, t in params.items()} for _ in range(3)]
    updates = [make_update(device, delta) for device, delta in enumerate(deltas)]
    x = images.get_normalised(slice(None))

    def compute_logits(values):
        return torch.func.functional_call(make_cnn(), values, (x,))

    teachers = [compute_logits({n: params[n] + delta[n] for n in params}) for delta in deltas]
    target = torch.stack(teachers).mean(0).softmax(1)

    def compute_divergence(values):
        log_probabilities = compute_logits(values).log_softmax(1)
        return float(F.kl_div(log_probabilities, target, reduction="batchmean"))

    result = distil(FedDf(steps=200, lr=0.01), net, params, updates)
    assert compute_divergence(result) < 0.05 * compute_divergence(params)


def test_a_narrow_device_teaches_what_its_own_network_computes():
    net = elastic(make_cnn(), torch.zeros(1, 1, 6, 6))
    before, narrow = get_params(net.module), net.select_prefix(0.5)
    sent = net.take(before, narrow)
    delta = {name: torch.full_like(tensor, 0.1) for name, tensor in sent.items()}
    update = replace(make_update(0, delta), subnet=narrow)
    # the first two of four filters, written down as a network of its own
    own = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8))
    own.extend([nn.ReLU(), nn.Linear(8, 4)])
    own.load_state_dict({name: tensor + 0.1 for name, tensor in sent.items()})
    x = torch.rand(5, 1, 6, 6)
    torch.testing.assert_close(_make_teacher(net, before, update)(x), own(x))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_has_the_gradient_of_the_divergence(temperature):
    torch.manual_seed(0)
    logits, output = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    loss = _make_distillation_loss(logits, temperature)(output)
    (ours,) = torch.autograd.grad(loss, output)
    divergence = F.kl_div(
        (output / temperature).log_softmax(1),
        (logits / temperature).softmax(1),
        reduction="batchmean",
    )
    (theirs,) = torch.autograd.grad(divergence, output)
    torch.testing.assert_close(ours, theirs)


def test_without_updates_a_round_changes_nothing():
    slow = Fleet(size=4, speed=ConstantTrace(1e-6))
    settings = RunSettings(rounds=2, per_round=3, rules=RoundRules(late="discard"))
    arguments = (make_cnn(), make_data(), slow)
    records = list(simulate(FedDf(FedAvg(LOCAL)), *arguments, settings=settings))
    plain = list(simulate(FedAvg(LOCAL), *arguments, settings=settings))
    assert records[-1].digest == plain[-1].digest


def test_it_keeps_the_verbs_of_the_inner_method():
    method = FedDf(HeteroFl(LOCAL))
    assert isinstance(method, HasBudgetPolicy)
    assert isinstance(method, SendsSubnets)
    assert not isinstance(FedDf(FedAvg(LOCAL)), HasBudgetPolicy)
    assert FedDf(Scaffold(LOCAL)).fit_fleet(7).inner.devices == 7
    assert decode(encode(method), FedDf) == method


@pytest.mark.parametrize("inner", [FedAvg(LOCAL), HeteroFl(LOCAL, s=0.5, levels=2)])
def test_it_costs_devices_what_the_inner_method_costs(inner, tmp_path):
    fleet = Fleet(size=4, speed=ConstantTrace(0.3))
    run(FedDf(inner, steps=2), tmp_path / "distilled", fleet=fleet)
    run(inner, tmp_path / "plain", fleet=fleet)
    distilled, plain = (
        [(r.device, r.macs, r.down, r.up) for r in records if hasattr(r, "device")]
        for records in (read_records(tmp_path / name) for name in ("distilled", "plain"))
    )
    assert distilled == plain


def test_the_servers_work_is_counted(tmp_path):
    fleet, method = Fleet(size=4, speed=ConstantTrace(0.3)), HeteroFl(LOCAL, s=0.5, levels=2)
    records = run(FedDf(method, steps=2, batch=100), tmp_path, fleet=fleet)
    net = elastic(make_cnn(), torch.zeros(1, 1, 6, 6))
    # three teachers of half the filters; the student's images need no gradient
    forward = 2 * 4 * 4 * 9 + 32 * 8 + 8 * 4
    student = 2 * 576 + 3 * 512 + 3 * 32
    assert net.macs(net.select_prefix(0.5)) == forward
    proxy = 8  # fewer than a mini-batch
    assert {record.server_macs for record in records} == {2 * proxy * (3 * forward + student)}
    assert all(record.server_macs == 0.0 for record in run(method, fleet=fleet))
    (row,) = summarise_groups(group_runs(load_runs([tmp_path])), 0.9)
    assert row.server_gigamacs == 3 * records[0].server_macs / 1e9


def test_two_workers_give_the_same_network():
    method = FedDf(HeteroFl(LOCAL, s=0.5, levels=2), steps=2)
    digests = {run(method, workers=w)[-1].digest for w in (InlineWorkers(), ProcessWorkers(2))}
    assert len(digests) == 1


def test_it_needs_proxy_images():
    data = make_data()
    empty = data.proxy.select([])
    with pytest.raises(ValueError, match="Expected proxy images for FedDf to train on, got none"):
        run(FedDf(FedAvg(LOCAL)), data=replace(data, proxy=empty))
