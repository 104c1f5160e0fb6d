"""Compare the compact pass of an elastic network with the masked oracle."""

from collections.abc import Iterable

import torch
from tests.nn.masked import masked_forward
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params, get_params
from pliant.rng import rng_stream


def assert_compact_equals_masked(
    module: nn.Module, x: Tensor, *, coupled: bool, seeds: Iterable[int] = (0,)
) -> None:
    net, params = elastic(module, x, coupled=coupled, check=False), get_params(module)
    samples = [subnet for seed in seeds for subnet in sample_subnets(net, seed)]
    for subnet in [net.full, *samples]:
        outputs, tensors = run_compact(net, params, subnet, x)
        masked_outputs, masked_tensors = run_masked(net, module, subnet, x)
        for index, (compact, masked) in enumerate(zip(outputs, masked_outputs, strict=True)):
            assert_close(compact, masked, f"output {index}")
        for name in tensors:
            assert_close(tensors[name], masked_tensors[name], name)


def sample_subnets(net: Elastic, seed: int) -> list[Subnet]:
    """Return subnets of every kind, with a different rate per site."""
    rng = rng_stream(seed, "rates")
    rates = rng.uniform(0, 0.8, len(net.sites))
    return [
        net.draw(rates, rng, "bernoulli"),
        net.draw(rates, rng, "rounded"),
        net.draw(rates, rng, "blocks"),
        net.select_prefix(rates),
        net.select_prefix(rates, net.make_rolling_orders(3), rescale=True),
    ]


def run_compact(
    net: Elastic, params: Params, subnet: Subnet, x: Tensor
) -> tuple[list[Tensor], Params]:
    """Return outputs, and full-size gradients and buffers, of the compact pass."""
    small = net.take(params, subnet)
    leaves = {n: t.requires_grad_() for n, t in small.items() if n not in net.buffer_names}
    outputs = pytree.tree_leaves(net.run(small, subnet, x))
    grads = torch.autograd.grad(weighted_sum(outputs), list(leaves.values()), allow_unused=True)
    subnet_grads = {
        name: grad if grad is not None else torch.zeros_like(leaves[name])
        for name, grad in zip(leaves, grads, strict=True)
    }
    full, _ = net.embed({n: params[n] for n in leaves}, subnet_grads, subnet)
    buffers = {name: tensor for name, tensor in small.items() if name in net.buffer_names}
    return outputs, full | net.put({n: params[n] for n in buffers}, buffers, subnet)


def run_masked(
    net: Elastic, module: nn.Module, subnet: Subnet, x: Tensor
) -> tuple[list[Tensor], Params]:
    """Return outputs, gradients and buffers of the masked oracle."""
    layers = {
        layer: (index, torch.from_numpy(subnet.masks[index].copy()), subnet.scales[index], block)
        for index, site in enumerate(net.sites)
        for layer, block in zip(site.layers, net.groups[index].blocks, strict=True)
    }
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    module.zero_grad()
    outputs = pytree.tree_leaves(masked_forward(module, x, layers))
    weighted_sum(outputs).backward()
    grads = {
        name: tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        for name, tensor in module.named_parameters()
    }
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    for name, tensor in module.named_buffers():
        tensor.copy_(before[name])
    return outputs, grads | buffers


def weighted_sum(outputs: list[Tensor]) -> Tensor:
    """Return a loss that depends differently on every output."""
    rng = rng_stream(0, "loss")
    weights = [torch.from_numpy(rng.standard_normal(tuple(o.shape))) for o in outputs]
    return sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))  # type: ignore[return-value]


def assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    size = max(float(expected.detach().abs().max()), 1e-3) if expected.numel() else 1.0
    gap = float((actual.detach() - expected.detach()).abs().max()) if expected.numel() else 0.0
    assert gap <= 1e-5 * size, f"{name}: differs by {gap} of {size}"
