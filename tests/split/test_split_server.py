import pytest
import torch
import torch.nn.functional as F
from little import network

from pliant.nn.cut import cut
from pliant.nn.elastic import elastic
from pliant.nn.optimiser import Adam
from pliant.params import params_of
from pliant.split.part import Part
from pliant.split.server import Common, Masked

X = torch.zeros(1, 1, 16, 16)
RULE = Adam(lr=1e-2, weight_decay=1e-5)


def sides():
    server = cut(network(), X, "stage1").server
    return server, elastic(server, torch.zeros(1, 4, 8, 8))


def masked(**options):
    server, net = sides()
    options = {"penalty": 1e-3, "penalised": "own", "seed": 0} | options
    return Masked(net, params_of(server), RULE, **options)


def batch(count=6):
    draws = torch.Generator().manual_seed(0)
    return torch.rand(count, 4, 8, 8, generator=draws), torch.arange(count) % 3


def oracle(server, logits, penalty, steps):
    """Train weights and one mask by torch.optim.Adam and autograd alone."""
    weights = {n: p.detach().clone().requires_grad_() for n, p in server.named_parameters()}
    logits = {name: tensor.clone().requires_grad_() for name, tensor in logits.items()}
    optimiser = torch.optim.Adam(
        [*weights.values(), *logits.values()], lr=RULE.lr, weight_decay=RULE.weight_decay
    )
    x, y = batch()
    for _ in range(steps):
        effective = {name: weights[name] * torch.sigmoid(logits[name]) for name in weights}
        loss = F.cross_entropy(torch.func.functional_call(server, effective, (x,)), y)
        loss = loss + penalty * sum(torch.sigmoid(logit).sum() for logit in logits.values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return weights, logits


def test_weights_and_masks_move_as_autograd_and_adam_say():
    server, _ = sides()
    ours = masked()
    first = {name: tensor.clone() for name, tensor in ours.mask(4).params.items()}
    for _ in range(3):
        ours.step(4, *batch(), RULE.lr, back=False)
    weights, logits = oracle(server, first, 1e-3, 3)
    for name in weights:
        assert torch.allclose(ours.part.params[name], weights[name], atol=1e-5), name
        assert torch.allclose(ours.masks[4].params[name], logits[name], atol=1e-5), name


@pytest.mark.parametrize("penalised", ["own", "all"])
def test_other_masks_move_only_where_all_are_penalised(penalised):
    ours = masked(penalised=penalised)
    before = {name: tensor.clone() for name, tensor in ours.mask(1).params.items()}
    ours.step(0, *batch(), RULE.lr, back=False)
    moved = any(not torch.equal(before[name], ours.masks[1].params[name]) for name in before)
    assert moved == (penalised == "all")


def test_a_mask_depends_on_its_client_alone():
    one, two = masked(), masked()
    two.mask(7)
    assert all(torch.equal(t, two.mask(3).params[n]) for n, t in one.mask(3).params.items())
    assert not torch.equal(two.mask(3).params["stage5.bias"], two.mask(7).params["stage5.bias"])


def test_shut_gates_give_exact_zeros_and_open_ones_stay_as_they_are():
    ours = masked()
    soft, hard = ours.effective(0), ours.effective(0, threshold=0.5)
    gates = torch.sigmoid(ours.mask(0).params["stage3.1.weight"])
    is_shut = gates < 0.5
    assert 0.3 < is_shut.float().mean() < 0.7
    assert not hard["stage3.1.weight"][is_shut].any()
    assert torch.equal(hard["stage3.1.weight"][~is_shut], soft["stage3.1.weight"][~is_shut])


def test_without_loss_the_penalty_drives_a_gate_to_its_fixed_point():
    """lambda = 1e-3, decay 1e-5: m = -3.33 where lambda s (1 - s) = -1e-5 m."""
    logit = torch.tensor([0.0])
    memory = [[torch.zeros(1)], [torch.zeros(1)]]
    from pliant.split.part import move

    for time in range(1, 6001):
        gate = torch.sigmoid(logit)
        move(
            Adam(lr=5e-3, weight_decay=1e-5),
            [logit],
            [1e-3 * gate * (1 - gate)],
            memory,
            5e-3,
            time,
        )
    assert float(logit) == pytest.approx(-3.33, abs=0.02)


@pytest.mark.parametrize(
    "make", [masked, lambda: Common(Part(sides()[1], params_of(sides()[0]), RULE))]
)
def test_a_server_that_was_saved_goes_on_as_it_was(make):
    one, two = make(), make()
    for client in (0, 1):
        one.step(client, *batch(), 1e-2, back=False)
    two.restore(one.state())
    answers = [server.step(1, *batch(), 1e-2, back=True) for server in (one, two)]
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])
    state = one.state()
    assert state.keys() == two.state().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in two.state().items())
