from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.split.small_split import make_network

from pliant.nn.cut import split_network
from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Adam
from pliant.params import clone, get_params
from pliant.split.part import TrainablePart
from pliant.split.server import MaskedServer, ServerCopies, SharedServer

X = torch.zeros(1, 1, 16, 16)
ADAM = Adam(lr=1e-2, weight_decay=1e-5)


def make_module():
    return split_network(make_network(), X, "stage1").server


def make_net():
    return elastic(make_module(), torch.zeros(1, 4, 8, 8))


def make_part():
    return TrainablePart(make_net(), get_params(make_module()), ADAM)


def make_masked(**options):
    return MaskedServer(
        make_part(), 8, **{"penalty": 1e-3, "penalised": "own", "seed": 0} | options
    )


def make_shared():
    return SharedServer(make_net(), get_params(make_module()), ADAM)


def make_copies():
    return ServerCopies(make_shared())


def make_batch(count=6):
    rng = torch.Generator().manual_seed(0)
    return torch.rand(count, 4, 8, 8, generator=rng), torch.arange(count) % 3


def train_with_autograd(module, logits, penalty, steps):
    """Train weights and one mask by torch.optim.Adam and autograd alone."""
    weights = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    logits = {name: tensor.clone().requires_grad_() for name, tensor in logits.items()}
    optimiser = torch.optim.Adam(
        [*weights.values(), *logits.values()], lr=ADAM.lr, weight_decay=ADAM.weight_decay
    )
    x, y = make_batch()
    for _ in range(steps):
        effective = {name: weights[name] * torch.sigmoid(logits[name]) for name in weights}
        loss = F.cross_entropy(torch.func.functional_call(module, effective, (x,)), y)
        loss = loss + penalty * sum(torch.sigmoid(logit).sum() for logit in logits.values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return weights, logits


def test_weights_and_masks_train_as_with_autograd_and_adam():
    server = make_masked()
    initial = {name: tensor.clone() for name, tensor in server.get_mask(4).params.items()}
    for _ in range(3):
        server.step(4, *make_batch(), ADAM.lr, needs_gradient=False)
    weights, logits = train_with_autograd(make_module(), initial, 1e-3, 3)
    for name in weights:
        assert torch.allclose(server.part.params[name], weights[name], atol=1e-5), name
        assert torch.allclose(server.masks[4].params[name], logits[name], atol=1e-5), name


@pytest.mark.parametrize("penalised", ["own", "all"])
def test_other_masks_change_only_if_all_are_penalised(penalised):
    server = make_masked(penalised=penalised)
    before = {name: tensor.clone() for name, tensor in server.get_mask(1).params.items()}
    server.step(0, *make_batch(), ADAM.lr, needs_gradient=False)
    after = server.masks[1].params
    has_changed = any(not torch.equal(before[name], after[name]) for name in before)
    assert has_changed == (penalised == "all")


def test_a_mask_depends_on_its_client_only():
    first, second = make_masked(), make_masked()
    second.get_mask(7)
    mask = second.get_mask(3).params
    assert all(torch.equal(tensor, mask[n]) for n, tensor in first.get_mask(3).params.items())
    assert not torch.equal(mask["stage5.bias"], second.get_mask(7).params["stage5.bias"])


def test_a_threshold_closes_gates_below_it_and_leaves_the_others():
    server = make_masked()
    soft, hard = server.effective_params(0), server.effective_params(0, threshold=0.5)
    is_closed = torch.sigmoid(server.get_mask(0).params["stage3.1.weight"]) < 0.5
    assert 0.3 < is_closed.float().mean() < 0.7
    assert not hard["stage3.1.weight"][is_closed].any()
    assert torch.equal(hard["stage3.1.weight"][~is_closed], soft["stage3.1.weight"][~is_closed])


def test_without_a_loss_the_penalty_drives_a_gate_to_its_fixed_point():
    """lambda = 1e-3, decay 1e-5: m = -3.33 where lambda s (1 - s) = -1e-5 m."""
    net, adam = SimpleNamespace(trainable_names=["logit"]), Adam(lr=5e-3, weight_decay=1e-5)
    mask = TrainablePart(net, {"logit": torch.zeros(1)}, adam)
    for _ in range(6000):
        gate = torch.sigmoid(mask.params["logit"])
        mask.step_params({"logit": 1e-3 * gate * (1 - gate)}, adam.lr)
    assert float(mask.params["logit"]) == pytest.approx(-3.33, abs=0.02)


@pytest.mark.parametrize("make_server", [make_masked, make_copies])
def test_a_restored_server_forgets_what_it_made_for_a_client_since(make_server):
    server, other = make_server(), make_server()
    state = clone(server.state_dict())
    server.step(1, *make_batch(), 1e-2, needs_gradient=False)
    server.load_state_dict(state)
    for each in (server, other):
        each.step(1, *make_batch(), 1e-2, needs_gradient=False)
    expected = other.state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in server.state_dict().items())


@pytest.mark.parametrize("make_server", [make_masked, make_shared, make_copies])
def test_a_restored_server_continues_bit_for_bit(make_server):
    original, restored = make_server(), make_server()
    for client in (0, 1):
        original.step(client, *make_batch(), 1e-2, needs_gradient=False)
    restored.load_state_dict(original.state_dict())
    (loss, gradient), (restored_loss, restored_gradient) = (
        server.step(1, *make_batch(), 1e-2, needs_gradient=True) for server in (original, restored)
    )
    assert loss == restored_loss
    assert torch.equal(gradient, restored_gradient)
    state, restored_state = original.state_dict(), restored.state_dict()
    assert state.keys() == restored_state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in restored_state.items())
