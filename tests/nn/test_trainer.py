"""Training with changing subnets matches torch and moves only kept entries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.nn.zoo import ZOO
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.frozen_cost import count_unfrozen_macs, group_params
from pliant.nn.models import cifar_cnn, digits_cnn_bn, resnet20
from pliant.nn.optimisers import Adam, Optimiser, Sgd
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params, clone, get_params
from pliant.rng import rng_stream

PLAIN = ["plain", "projected_residual", "dense", "group_norms", "learned_scale", "two_draw_product"]
OPTIMISERS: list[tuple[Optimiser, Callable[[Any], torch.optim.Optimizer], float]] = [
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


def make_batch(x: Tensor, step: int) -> Tensor:
    values = rng_stream(0, "batch", step).standard_normal(tuple(x.shape))
    return torch.from_numpy(values).to(x.dtype)


def mean_square(outputs: Any) -> Tensor:
    return torch.stack([out.square().mean() for out in pytree.tree_leaves(outputs)]).sum()


def assert_close(left: Params, right: Params, gap: float = 1e-12) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=gap, atol=gap, msg=name)


def assert_equal(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize(("ours", "theirs", "clip"), OPTIMISERS)
@pytest.mark.parametrize("name", PLAIN)
def test_with_all_filters_it_equals_plain_training(
    name: str, ours: Optimiser, theirs: Callable[[Any], torch.optim.Optimizer], clip: float
) -> None:
    module, x = ZOO[name]()
    net, start = elastic(module, x), get_params(module)
    trainer, torch_optimiser = SubnetTrainer(net, start, ours), theirs(module.parameters())
    module.train()
    for step in range(5):
        if step % 2:  # also a new subnet with all filters
            trainer.switch(net.select_prefix(0.0))
        loss = trainer.step(make_batch(x, step), mean_square)
        torch_optimiser.zero_grad()
        torch_loss = mean_square(module(make_batch(x, step)))
        torch_loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        torch_optimiser.step()
        torch.testing.assert_close(loss, torch_loss.detach(), rtol=1e-12, atol=1e-12)
    assert_close(trainer.params(), get_params(module))
    counters = [name for name in start if name.endswith("num_batches_tracked")]
    assert all(int(trainer.params()[name]) == 5 for name in counters)


@pytest.mark.parametrize(("ours", "theirs", "clip"), OPTIMISERS)
def test_a_head_outside_the_loss_does_not_change(
    ours: Optimiser, theirs: Callable[[Any], torch.optim.Optimizer], clip: float
) -> None:
    module, x = ZOO["auxiliary"]()
    trainer, start = SubnetTrainer(elastic(module, x), get_params(module), ours), get_params(module)
    for step in range(2):
        trainer.step(make_batch(x, step), lambda outputs: outputs["out"].square().mean())
    after = trainer.params()
    for name in ("auxiliary.weight", "auxiliary.bias"):  # like torch: no gradient, no decay
        assert torch.equal(after[name], start[name]), name


def test_a_frozen_layer_stays_frozen() -> None:
    module, x = ZOO["plain"]()
    module.features.requires_grad_(False)
    start = get_params(module)
    trainer = SubnetTrainer(elastic(module, x), get_params(module), Sgd())
    trainer.step(x, mean_square)
    after = trainer.params()
    assert torch.equal(after["features.0.weight"], start["features.0.weight"])
    assert not torch.equal(after["head.1.weight"], start["head.1.weight"])


@pytest.mark.parametrize(("ours", "theirs", "clip"), OPTIMISERS)
@pytest.mark.parametrize("name", [*PLAIN, "shared_twice", "slice_spread", "squeeze_excite"])
def test_entries_that_were_never_kept_do_not_change(
    name: str, ours: Optimiser, theirs: Callable[[Any], torch.optim.Optimizer], clip: float
) -> None:
    module, x = ZOO[name]()
    net, start = elastic(module, x), get_params(module)
    trainer = SubnetTrainer(net, start, ours)
    num_kept = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for step in range(2):
        subnet = net.draw(0.7, rng_stream(5, step))
        trainer.switch(subnet)
        trainer.step(make_batch(x, step), mean_square)
        _, counts = net.embed(start, net.take(start, subnet), subnet)
        num_kept = {name: num_kept[name] + counts[name] for name in start}
    end_params, num_never = trainer.params(), 0
    for name in start:
        is_never_kept = num_kept[name] == 0
        assert torch.equal(end_params[name][is_never_kept], start[name][is_never_kept]), name
        num_never += int(is_never_kept.sum())
    assert num_never, "expected entries that were never kept"


@pytest.mark.parametrize("name", [*PLAIN, "shared_twice", "slice_spread", "squeeze_excite"])
def test_a_step_without_gradient_moves_only_entries_with_momentum(name: str) -> None:
    module, x = ZOO[name]()
    net, start = elastic(module, x), get_params(module)
    trainer = SubnetTrainer(net, start, Sgd(lr=0.1, momentum=0.9))
    subnet = net.draw(0.7, rng_stream(5, 0))
    trainer.switch(subnet)
    trainer.step(make_batch(x, 0), mean_square)
    before = trainer.params()
    trainer.switch(net.full)
    trainer.step(make_batch(x, 1), lambda outputs: mean_square(outputs) * 0)
    _, counts = net.embed(start, net.take(start, subnet), subnet)
    after, num_moved = trainer.params(), 0
    for name in start.keys() - net.buffer_names:
        is_never_kept = counts[name] == 0
        assert torch.equal(after[name][is_never_kept], before[name][is_never_kept]), name
        num_moved += int((after[name] != before[name]).sum())
    assert num_moved, "expected kept entries to move by their momentum"


def test_statistics_of_absent_channels_do_not_change() -> None:
    module, x = ZOO["dense"]()
    net, start = elastic(module, x), get_params(module)
    trainer, subnet = SubnetTrainer(net, start, Sgd(lr=0.1)), net.select_prefix(0.5)
    trainer.switch(subnet)
    trainer.step(make_batch(x, 0), mean_square)
    after = trainer.params()
    is_kept = torch.tensor([True, True, False, False])  # the four filters of the stem
    for name in ("norms.0.running_mean", "norms.0.running_var"):
        assert torch.equal(after[name][~is_kept], start[name][~is_kept])
        assert (after[name][is_kept] != start[name][is_kept]).all()
    assert int(after["norms.0.num_batches_tracked"]) == 1


def test_an_absent_filter_keeps_its_momentum() -> None:
    """By hand: momentum 0.5, lr 1, gradients 2, absent, 2."""
    module = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(2, 1)).double()
    net = elastic(module, torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    start = {
        "0.weight": torch.zeros(2, 1, 1, 1).double(),
        "2.weight": torch.ones(1, 2).double(),
        "2.bias": torch.zeros(1).double(),
    }
    trainer = SubnetTrainer(net, start, Sgd(lr=1.0, momentum=0.5))
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    left, right = net.select_prefix(0.5), net.select_prefix(0.5, net.make_rolling_orders(1))
    weights = []
    for subnet in (left, right, left):
        trainer.switch(subnet)
        trainer.step(x, lambda out: 2 * out.sum(), lr=1.0)
        weights.append(trainer.params()["0.weight"].flatten().tolist())
    # the head moves too: its bias by 2, its kept weight by 2 x its input
    assert weights[0] == [-2.0, 0.0]
    assert weights[1] == [-2.0, -2.0]
    # the first filter meets a head weight of 1 + 0 (its input was 0): gradient 2, momentum 0.5 * 2
    assert weights[2] == [-5.0, -2.0]


def test_switching_to_the_current_subnet_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = ZOO["dense"]()
    net = elastic(module, x)
    trainer, subnet = SubnetTrainer(net, get_params(module), Sgd()), net.select_prefix(0.5)
    trainer.switch(subnet)

    def refuse(*_: object) -> None:
        raise AssertionError("bound again")

    monkeypatch.setattr(Elastic, "bind", refuse)
    trainer.switch(subnet)
    trainer.step(x, mean_square)
    with pytest.raises(AssertionError, match="bound again"):
        trainer.switch(net.select_prefix(0.5))


def test_parameters_are_copied_in_and_out() -> None:
    module, x = ZOO["dense"]()
    net, start = elastic(module, x), get_params(module)
    before = clone(start)
    trainer = SubnetTrainer(net, start, Sgd(lr=0.1, momentum=0.9))
    trainer.step(x, mean_square)
    assert_equal(start, before)
    after = trainer.params()
    saved = clone(after)
    trainer.switch(net.select_prefix(0.5))
    trainer.step(x, mean_square)
    assert_equal(after, saved)
    for tensor in after.values():
        tensor.zero_()
    assert trainer.params()["head.weight"].abs().sum() > 0
    assert_equal(get_params(module), before)


def test_reading_the_parameters_changes_nothing() -> None:
    module, x = ZOO["dense"]()
    net, start = elastic(module, x), get_params(module)
    trainers = [SubnetTrainer(net, start, Adam()) for _ in range(2)]
    for step in range(4):
        for index, trainer in enumerate(trainers):
            trainer.switch(net.draw(0.5, rng_stream(0, step // 2)))
            trainer.step(make_batch(x, step), mean_square)
            if index:
                trainer.params()
    assert_equal(trainers[0].params(), trainers[1].params())


def test_a_learning_rate_can_be_set_for_one_step() -> None:
    module, x = ZOO["plain"]()
    net, start = elastic(module, x), get_params(module)
    trainer = SubnetTrainer(net, start, Sgd(lr=0.1))
    trainer.step(x, mean_square, lr=0.0)
    assert_equal(trainer.params(), start)
    trainer.step(x, mean_square)
    assert not torch.equal(trainer.params()["head.1.weight"], start["head.1.weight"])


def test_half_precision_runs_under_autocast() -> None:
    torch.manual_seed(0)  # with one seed in fifteen, six steps are too few
    module, x = digits_cnn_bn(), torch.rand(8, 1, 28, 28)
    net = elastic(module, x)
    trainer = SubnetTrainer(net, get_params(module), Sgd(lr=0.05, momentum=0.9))
    losses = []
    for step in range(6):
        trainer.switch(net.draw(0.25, rng_stream(0, step)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(float(trainer.step(x, lambda out: out.float().square().mean())))
    assert losses[-1] < losses[0]
    assert all(t.dtype != torch.bfloat16 for t in trainer.params().values())


def test_a_subnet_of_another_network_is_refused() -> None:
    module, x = ZOO["dense"]()
    other = elastic(*ZOO["plain"]())
    trainer = SubnetTrainer(elastic(module, x), get_params(module), Sgd())
    with pytest.raises(ValueError, match=r"Expected a subnet of this network \(4 sites .*another"):
        trainer.switch(other.full)
    trainer.step(x, mean_square)  # the previous subnet still works


@pytest.mark.parametrize(("make", "layers"), [(cifar_cnn, 1), (cifar_cnn, 3), (resnet20, 8)])
def test_frozen_layers_are_not_differentiated(make: Callable[[], nn.Module], layers: int) -> None:
    net, x = elastic(make(), torch.zeros(1, 3, 32, 32)), torch.rand(16, 3, 32, 32)
    trainer = SubnetTrainer(net, get_params(net.module), Sgd(lr=0.1))
    full = net.macs(net.full, training=True)
    frozen = frozenset[str]().union(*group_params(net)[:layers])
    for names, macs in ((frozen, count_unfrozen_macs(net, frozen)), (frozenset[str](), full)):
        trainer.freeze(names)
        with FlopCounterMode(display=False) as counter:
            trainer.step(x, lambda output: output.square().sum())
        assert counter.get_total_flops() == 2 * len(x) * macs
    assert count_unfrozen_macs(net, frozen) < 0.9 * full
