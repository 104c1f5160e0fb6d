"""Methods that train the full network, checked against hand-computed numbers."""

import pytest
import torch
from tests.methods.tiny_runs import (
    PLAIN,
    get_weights,
    make_batch,
    make_context,
    make_net,
    make_state,
    make_update,
)

from pliant.devices import Fleet
from pliant.engine.round_loop import Run, RunSettings
from pliant.engine.run_store import RunState
from pliant.methods import FedAvg, FedNova, FedProx, LocalTraining, Scaffold, ServerAdam, ServerSgd
from pliant.methods.base import Update
from pliant.nn.optimisers import Adam, Sgd
from pliant.params import get_params


def run_round(method, devices, state=None):
    net = make_net()
    state = state or make_state(net, method)
    updates = [make_update(method, net, state, *device) for device in devices]
    return method.merge(net, state, updates)


# device 0 has class 0 and x = 2, device 1 class 1 and x = 4
TWO_DEVICES = [(0, [make_batch(2)]), (1, [make_batch(4, 1)])]


def test_fedavg_is_the_mean_by_samples():
    state = run_round(FedAvg(PLAIN), [(0, [make_batch(2, 0, 3)]), (1, [make_batch(4, 1)])])
    assert get_weights(state) == [(3 * 1 - 2) / 4, (-3 * 1 + 2) / 4]


def test_fedavg_can_weight_devices_equally():
    state = run_round(
        FedAvg(PLAIN, weighting="equal"), [(0, [make_batch(2, 0, 3)]), (1, [make_batch(4, 1)])]
    )
    assert get_weights(state) == [-0.5, 0.5]


def test_server_momentum_carries_over():
    method = FedAvg(PLAIN, server=ServerSgd(lr=2.0, momentum=0.5))
    state = run_round(method, TWO_DEVICES)
    assert get_weights(state) == [-1.0, 1.0]
    state = run_round(method, [(0, [make_batch(0)])], state)  # no gradient: half of the last delta
    assert get_weights(state) == [-1.5, 1.5]


@pytest.mark.parametrize("server", [ServerSgd(lr=0.5, momentum=0.5), ServerAdam(lr=0.5)])
def test_a_server_optimiser_leaves_untrained_tensors_alone(server):
    state = run_round(FedAvg(PLAIN, server=server), TWO_DEVICES)
    assert torch.equal(state.params["2.weight"], torch.eye(2))
    assert set(state.momentum) == {"0.weight"}


def test_fedprox_pulls_back_to_what_was_sent():
    # the second sample has no gradient: only the proximal term moves a from 1 to 1 - 0.25
    state = run_round(FedProx(0.25, PLAIN), [(0, [make_batch(2), make_batch(0)])])
    assert get_weights(state) == [0.75, -0.75]


def test_fednova_averages_deltas_per_step():
    # steps 2 and 1: 1.5 · (1/2 · 1/2 + 1/2 · -2/1)
    state = run_round(
        FedNova(PLAIN), [(0, [make_batch(2), make_batch(0)]), (1, [make_batch(4, 1)])]
    )
    assert get_weights(state) == [-1.125, 1.125]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_fednova_steps_along_the_mean_gradient_whatever_the_numbers_of_steps(momentum):
    # devices whose gradients are constant, trained by torch's own SGD
    net = make_net()
    gradients, steps = torch.tensor([[3.0, -1.0], [0.5, 2.0]]), (2, 7)
    updates = []
    for device, (gradient, count) in enumerate(zip(gradients, steps, strict=True)):
        weight = torch.zeros(2, 1, 1, 1, requires_grad=True)
        optimiser = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
        for _ in range(count):
            weight.grad = gradient.view(2, 1, 1, 1).clone()
            optimiser.step()
        zeros = {name: 0 * tensor for name, tensor in get_params(net.module).items()}
        delta = zeros | {"0.weight": weight.detach()}
        updates.append(Update(device, delta, count, count, 1.0, 0.0, num_samples=10))
    method = FedNova(LocalTraining(Sgd(lr=0.1, momentum=momentum)))
    merged = torch.tensor(get_weights(method.merge(net, make_state(net, method), updates)))
    mean = gradients.mean(dim=0)
    length = -merged[0] / mean[0]
    torch.testing.assert_close(merged, -length * mean)
    lengths = [
        u.delta["0.weight"].norm() / g.norm() for u, g in zip(updates, gradients, strict=True)
    ]
    torch.testing.assert_close(length, sum(lengths) / 2)


def test_fednova_rejects_adam():
    with pytest.raises(ValueError, match="Expected SGD"):
        FedNova(LocalTraining(Adam()))


def test_scaffold_steps_against_the_drift():
    net, method = make_net(), Scaffold(PLAIN)
    state = make_state(net, method)
    first = [make_update(method, net, state, *device) for device in TWO_DEVICES]
    assert first[0].device_state.control["0.weight"].flatten().tolist() == [
        -1.0,
        1.0,
    ]  # minus its delta
    assert first[1].device_state.control["0.weight"].flatten().tolist() == [2.0, -2.0]
    state = method.merge(net, state, first)
    assert get_weights(state) == [-0.5, 0.5]
    assert method.broadcast(state)["0.weight"].flatten().tolist() == [0.5, -0.5]
    # no gradient: the step is - lr · (c - c_0) = -(0.5 + 1)
    old = first[0].device_state
    second = make_update(method, net, state, 0, [make_batch(0)], round=1, device_state=old)
    assert second.delta["0.weight"].flatten().tolist() == [-1.5, 1.5]
    assert second.device_state.control["0.weight"].flatten().tolist() == [0.0, 0.0]
    state = method.merge(net, state, [second])
    assert method.broadcast(state)["0.weight"].flatten().tolist() == [
        1.0,
        -1.0,
    ]  # the mean of 0 and 2


def test_scaffold_can_take_the_mean_over_all_devices():
    net, method = make_net(), Scaffold(PLAIN, devices=10)
    state = make_state(net, method)
    state = method.merge(net, state, [make_update(method, net, state, 1, [make_batch(4, 1)])])
    torch.testing.assert_close(
        method.broadcast(state)["0.weight"].flatten(), torch.tensor([0.2, -0.2])
    )
    assert list(method.broadcast(state)) == ["0.weight"]
    assert method.broadcast(state) is state.control


@pytest.mark.parametrize(("devices", "count"), [(None, 12), (3, 3)])
def test_scaffold_counts_the_whole_fleet_by_default(devices, count):
    net, fleet = make_net(), Fleet(size=12)
    method = Scaffold(PLAIN, devices=devices)
    state = RunState(0, 0.0, make_state(net, method), {})
    run = Run(make_context(net, method), fleet, RunSettings(), state)
    update = make_update(method, net, state.server_state, 1, [make_batch(4, 1)])
    merged = run.context.merge(state.server_state, [update])
    assert merged.control["0.weight"].flatten().tolist() == pytest.approx([2 / count, -2 / count])


def test_scaffold_reports_the_size_of_its_variates():
    assert Scaffold(PLAIN).extra_upload_bytes(make_net()) == 2 * 4


@pytest.mark.parametrize("optimiser", [Adam(), Sgd(momentum=0.9)])
def test_scaffold_rejects_optimisers_other_than_plain_sgd(optimiser):
    with pytest.raises(ValueError, match="SGD without momentum"):
        Scaffold(LocalTraining(optimiser))


@pytest.mark.parametrize("method", [FedAvg(PLAIN), FedProx(0.1, PLAIN), FedNova(PLAIN)])
def test_a_round_without_updates_changes_nothing(method):
    net = make_net()
    assert get_weights(method.merge(net, make_state(net, method), [])) == [0.0, 0.0]


def test_an_update_counts_the_steps_of_each_subnet():
    net, method = make_net(), FedAvg(PLAIN)
    batches = [make_batch(2), make_batch(1), make_batch(0, 0, 3)]
    update = make_update(method, net, make_state(net, method), 0, batches, num_samples=5)
    assert update.subnet_steps == ((net.full, 3),)
    assert (update.steps, update.samples, update.num_samples) == (3, 5, 5)
    assert update.macs == 5 * net.macs(net.full, training=True)
