"""Training with changing subnets: the whole network as torch trains it, and nothing else moved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo import ZOO

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.learner import Learner
from pliant.nn.models import digits_cnn_bn
from pliant.nn.optimiser import Adam, Optimiser, Sgd
from pliant.params import Params, clone, params_of
from pliant.rng import stream

Made = tuple[nn.Module, Tensor]
PLAIN = ["plain", "projected_residual", "dense", "group_norms", "learned_scale", "two_draw_product"]
WAYS: list[tuple[Optimiser, Callable[[Any], torch.optim.Optimizer], float]] = [
    (
        Sgd(lr=0.05, momentum=0.9, weight_decay=0.01, clip=0.5),
        lambda params: torch.optim.SGD(params, 0.05, 0.9, weight_decay=0.01),
        0.5,
    ),
    (
        Adam(lr=0.01, weight_decay=0.01),
        lambda params: torch.optim.Adam(params, 0.01, weight_decay=0.01),
        0.0,
    ),
]


def batch(x: Tensor, step: int) -> Tensor:
    return torch.from_numpy(stream(0, "batch", step).standard_normal(tuple(x.shape))).to(x.dtype)


def squared(outputs: Any) -> Tensor:
    return torch.stack([out.square().mean() for out in pytree.tree_leaves(outputs)]).sum()


def near(left: Params, right: Params, gap: float = 1e-12) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=gap, atol=gap, msg=name)


def same(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize(("ours", "theirs", "clip"), WAYS)
@pytest.mark.parametrize("name", PLAIN)
def test_with_all_filters_it_is_plain_training(
    name: str, ours: Optimiser, theirs: Callable[[Any], torch.optim.Optimizer], clip: float
) -> None:
    module, x = ZOO[name]()
    net, start = elastic(module, x), params_of(module)
    learner, torchs = Learner(net, start, ours), theirs(module.parameters())
    module.train()
    for step in range(5):
        if step % 2:  # a new subnet with all filters, too
            learner.switch(net.first(0.0))
        loss = learner.step(batch(x, step), squared)
        torchs.zero_grad()
        wanted = squared(module(batch(x, step)))
        wanted.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        torchs.step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    near(learner.params(), params_of(module))
    counters = [name for name in start if name.endswith("num_batches_tracked")]
    assert all(int(learner.params()[name]) == 5 for name in counters)


@pytest.mark.parametrize(("ours", "theirs", "clip"), WAYS)
def test_a_head_that_the_loss_does_not_read_stays_as_it_is(
    ours: Optimiser, theirs: Callable[[Any], torch.optim.Optimizer], clip: float
) -> None:
    module, x = ZOO["auxiliary"]()
    learner, start = Learner(elastic(module, x), params_of(module), ours), params_of(module)
    for step in range(2):
        learner.step(batch(x, step), lambda outputs: outputs["out"].square().mean())
    found = learner.params()
    for name in ("auxiliary.weight", "auxiliary.bias"):  # as torch does: no gradient, no decay
        assert torch.equal(found[name], start[name]), name


def test_a_frozen_layer_stays_frozen() -> None:
    module, x = ZOO["plain"]()
    module.features.requires_grad_(False)
    learner, start = Learner(elastic(module, x), params_of(module), Sgd()), params_of(module)
    learner.step(x, squared)
    found = learner.params()
    assert torch.equal(found["features.0.weight"], start["features.0.weight"])
    assert not torch.equal(found["head.1.weight"], start["head.1.weight"])


@pytest.mark.parametrize(("ours", "theirs", "clip"), WAYS)
@pytest.mark.parametrize("name", [*PLAIN, "shared_twice", "slice_spread", "squeeze_excite"])
def test_what_was_never_kept_is_left_alone(
    name: str, ours: Optimiser, theirs: Callable[[Any], torch.optim.Optimizer], clip: float
) -> None:
    module, x = ZOO[name]()
    net, start = elastic(module, x), params_of(module)
    learner = Learner(net, start, ours)
    touched = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for step in range(2):
        subnet = net.draw(0.7, stream(5, step))
        learner.switch(subnet)
        learner.step(batch(x, step), squared)
        _, counts = net.embed(start, net.take(start, subnet), subnet)
        touched = {name: touched[name] + counts[name] for name in start}
    found, absent = learner.params(), 0
    for name in start:
        never = touched[name] == 0
        assert torch.equal(found[name][never], start[name][never]), name
        absent += int(never.sum())
    assert absent, "the test must see entries that were never kept"
    # with a step of no gradient only what has momentum moves: what was never kept has none
    resting = Learner(net, start, Sgd(lr=0.1, momentum=0.9))
    part = net.draw(0.7, stream(5, 0))
    resting.switch(part)
    resting.step(batch(x, 0), squared)
    before = resting.params()
    resting.switch(net.full)
    resting.step(batch(x, 1), lambda outputs: squared(outputs) * 0)
    _, counts = net.embed(start, net.take(start, part), part)
    after, moved = resting.params(), 0
    for name in start.keys() - net.buffers:
        never = counts[name] == 0
        assert torch.equal(after[name][never], before[name][never]), name
        moved += int((after[name] != before[name]).sum())
    assert moved, "what was kept goes on by its momentum"


def test_statistics_of_absent_channels_are_not_touched() -> None:
    module, x = ZOO["dense"]()
    net, start = elastic(module, x), params_of(module)
    learner, subnet = Learner(net, start, Sgd(lr=0.1)), net.first(0.5)
    learner.switch(subnet)
    learner.step(batch(x, 0), squared)
    found = learner.params()
    kept = torch.tensor([True, True, False, False])  # of the stem's four
    for name in ("norms.0.running_mean", "norms.0.running_var"):
        assert torch.equal(found[name][~kept], start[name][~kept])
        assert (found[name][kept] != start[name][kept]).all()
    assert int(found["norms.0.num_batches_tracked"]) == 1


def test_a_site_without_filters_in_use_keeps_its_momentum_until_it_is_back() -> None:
    """One weight on paper: momentum 0.5, lr 1, gradients 2, absent, 2."""
    module = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(2, 1)).double()
    net = elastic(module, torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    start = {
        "0.weight": torch.zeros(2, 1, 1, 1).double(),
        "2.weight": torch.ones(1, 2).double(),
        "2.bias": torch.zeros(1).double(),
    }
    learner = Learner(net, start, Sgd(lr=1.0, momentum=0.5))
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    left, right = net.first(0.5), net.first(0.5, net.rolled(1))
    seen = []
    for subnet in (left, right, left):
        learner.switch(subnet)
        learner.step(one, lambda out: 2 * out.sum(), lr=1.0)
        seen.append(learner.params()["0.weight"].flatten().tolist())
    # the head moves too: its bias by 2, its kept weight by 2 x what it reads
    assert seen[0] == [-2.0, 0.0]
    assert seen[1] == [-2.0, -2.0]
    # the first filter reads a head weight of 1 + 0 (its input was 0): gradient 2, memory 0.5 * 2
    assert seen[2] == [-5.0, -2.0]


def test_going_on_with_the_same_subnet_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = ZOO["dense"]()
    net = elastic(module, x)
    learner, subnet = Learner(net, params_of(module), Sgd()), net.first(0.5)
    learner.switch(subnet)

    def refuse(*_: object) -> None:
        raise AssertionError("bound again")

    monkeypatch.setattr(Elastic, "bind", refuse)
    learner.switch(subnet)
    learner.step(x, squared)
    with pytest.raises(AssertionError, match="bound again"):
        learner.switch(net.first(0.5))


def test_what_is_passed_in_and_given_out_is_not_shared() -> None:
    module, x = ZOO["dense"]()
    net, start = elastic(module, x), params_of(module)
    before = clone(start)
    learner = Learner(net, start, Sgd(lr=0.1, momentum=0.9))
    learner.step(x, squared)
    same(start, before)
    found = learner.params()
    kept = clone(found)
    learner.switch(net.first(0.5))
    learner.step(x, squared)
    same(found, kept)
    for tensor in found.values():
        tensor.zero_()
    assert learner.params()["head.weight"].abs().sum() > 0
    same(params_of(module), before)


def test_looking_at_the_parameters_changes_nothing() -> None:
    module, x = ZOO["dense"]()
    net, start = elastic(module, x), params_of(module)
    learners = [Learner(net, start, Adam()) for _ in range(2)]
    for step in range(4):
        for place, learner in enumerate(learners):
            learner.switch(net.draw(0.5, stream(0, step // 2)))
            learner.step(batch(x, step), squared)
            if place:
                learner.params()
    same(learners[0].params(), learners[1].params())


def test_a_rate_of_its_own_counts_for_one_step() -> None:
    module, x = ZOO["plain"]()
    net, start = elastic(module, x), params_of(module)
    learner = Learner(net, start, Sgd(lr=0.1))
    learner.step(x, squared, lr=0.0)
    same(learner.params(), start)
    learner.step(x, squared)
    assert not torch.equal(learner.params()["head.1.weight"], start["head.1.weight"])


def test_half_precision_runs_under_autocast() -> None:
    module, x = digits_cnn_bn(), torch.rand(8, 1, 28, 28)
    net = elastic(module, x)
    learner = Learner(net, params_of(module), Sgd(lr=0.05, momentum=0.9))
    losses = []
    for step in range(6):
        learner.switch(net.draw(0.25, stream(0, step)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(float(learner.step(x, lambda out: out.float().square().mean())))
    assert losses[-1] < losses[0]
    assert all(t.dtype != torch.bfloat16 for t in learner.params().values())


def test_a_subnet_of_another_network_is_refused() -> None:
    module, x = ZOO["dense"]()
    other = elastic(*ZOO["plain"]())
    learner = Learner(elastic(module, x), params_of(module), Sgd())
    with pytest.raises(ValueError, match=r"Expected a subnet of this network \(4 sites .*another"):
        learner.switch(other.full)
    learner.step(x, squared)  # it goes on with what it had
