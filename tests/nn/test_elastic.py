"""The law: a compact pass equals the full-size pass with masks, at the cost that torch counts."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from masked import masked_forward
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from zoo import ZOO

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.models import INPUT_SHAPES, MODELS
from pliant.nn.subnet import Subnet
from pliant.params import Params, params_of
from pliant.rng import stream

Made = tuple[nn.Module, Tensor]


def bundled(name: str) -> Made:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().double(), torch.randn(2, *INPUT_SHAPES[name], dtype=torch.float64)


def some(net: Elastic, seed: int) -> list[Subnet]:
    """Subnets of every kind: coins, rounded, a prefix, a rolled window; rates differ by site."""
    rng = stream(seed, "rates")
    rates = rng.uniform(0, 0.8, len(net.sites))
    return [
        net.draw(rates, rng),
        net.draw(rates, rng, "rounded"),
        net.draw(rates, rng, "blocks"),
        net.first(rates),
        net.first(rates, net.rolled(3), scaled=True),
    ]


def compact(net: Elastic, params: Params, subnet: Subnet, x: Tensor) -> tuple[list[Tensor], Params]:
    """Outputs, and gradients and buffers at full size with nothing where nothing is kept."""
    small = net.take(params, subnet)
    leaves = {n: t.requires_grad_() for n, t in small.items() if n not in net.buffers}
    outputs = pytree.tree_leaves(net.run(small, subnet, x))
    grads = torch.autograd.grad(weighed(outputs), list(leaves.values()), allow_unused=True)
    found = {
        name: grad if grad is not None else torch.zeros_like(leaves[name])
        for name, grad in zip(leaves, grads, strict=True)
    }
    full, _ = net.embed({n: params[n] for n in leaves}, found, subnet)
    buffers = {name: tensor for name, tensor in small.items() if name in net.buffers}
    return outputs, full | net.put({n: params[n] for n in buffers}, buffers, subnet)


def masked(
    net: Elastic, module: nn.Module, subnet: Subnet, x: Tensor
) -> tuple[list[Tensor], Params]:
    layers = {
        layer: (site, torch.from_numpy(mask.copy()), scale)
        for layer, (site, mask, scale) in net.kept(subnet).items()
    }
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    module.zero_grad()
    outputs = pytree.tree_leaves(masked_forward(module, x, layers))
    weighed(outputs).backward()
    found = {
        name: tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        for name, tensor in module.named_parameters()
    }
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    for name, tensor in module.named_buffers():
        tensor.copy_(before[name])
    return outputs, found | buffers


def weighed(outputs: list[Tensor]) -> Tensor:
    """A loss that tells all outputs apart."""
    rng = stream(0, "loss")
    weights = [torch.from_numpy(rng.standard_normal(tuple(o.shape))) for o in outputs]
    return sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))  # type: ignore[return-value]


def near(left: Tensor, right: Tensor, what: str) -> None:
    size = max(float(right.detach().abs().max()), 1e-3) if right.numel() else 1.0
    gap = float((left.detach() - right.detach()).abs().max()) if right.numel() else 0.0
    assert gap <= 1e-5 * size, f"{what}: differs by {gap} of {size}"


def obeys_the_law(module: nn.Module, x: Tensor, *, coupled: bool, seed: int) -> None:
    net, params = elastic(module, x, coupled=coupled), params_of(module)
    for subnet in [net.full, *some(net, seed)]:
        outputs, found = compact(net, params, subnet, x)
        wanted_outputs, wanted = masked(net, module, subnet, x)
        for number, (left, right) in enumerate(zip(outputs, wanted_outputs, strict=True)):
            near(left, right, f"output {number}")
        for name in found:
            near(found[name], wanted[name], name)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_compact_equals_masked_in_the_zoo(name: str, coupled: bool) -> None:
    module, x = ZOO[name]()
    for seed in range(3):
        obeys_the_law(module, x, coupled=coupled, seed=seed)


@pytest.mark.parametrize("name", MODELS)
def test_compact_equals_masked_for_bundled_networks(name: str) -> None:
    obeys_the_law(*bundled(name), coupled=True, seed=0)


def counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", [*ZOO, *MODELS])
def test_realised_macs_are_those_that_torch_counts(name: str, coupled: bool) -> None:
    module, x = ZOO[name]() if name in ZOO else bundled(name)
    net, params = elastic(module, x, coupled=coupled), params_of(module)
    for subnet in some(net, 1):
        small = net.take(params, subnet)
        found = counted(partial(net.run, small, subnet, x))
        assert found == len(x) * net.macs(subnet)
