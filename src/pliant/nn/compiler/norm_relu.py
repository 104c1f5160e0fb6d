"""Batch norm and the ReLU after it as one step of autograd, for large values.

The numbers are the same, but the gradient of the ReLU overwrites the one that it gets, which takes
half as long as writing to new memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant.nn.compiler import folded_norm
from pliant.nn.compiler.in_place import find_overwritten_input
from pliant.nn.compiler.refusals import has_hooks

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MIN_SIZE = 2**19  # entries; for smaller values, calling Python costs more than it saves


def find_fusable_relu(norm: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """Return the ReLU that alone reads a norm, if only a convolution reads it; None if none.

    The gradient of a convolution belongs to its reader alone; that of a sum, say, is shared.
    """
    relu = next(iter(norm.users), norm)
    reader = next(iter(relu.users), relu)
    called = [modules[str(n.target)] for n in (norm, relu, reader) if n.op == "call_module"]
    is_chain = len(norm.users) == len(relu.users) == 1 == len(relu.all_input_nodes)
    is_read_by_convolution = reader.op == "call_module" and isinstance(called[-1], CONVOLUTIONS)
    has_modes = any(n.meta.get("is_no_grad") for n in (norm, relu, reader))
    is_plain = relu.args[:1] == (norm,) and not has_modes and not any(map(has_hooks, called))
    if not (is_chain and is_read_by_convolution and is_plain):
        return None
    return relu if find_overwritten_input(relu, modules) is norm else None


def batch_norm_relu(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise by batch statistics, updating the running ones, and apply a ReLU."""
    if count := folded_norm.count_row_pixels(x):
        return folded_norm.normalise_folded(
            x, mean, variance, weight, bias, momentum=momentum, eps=eps, count=count, has_relu=True
        )
    if x.device.type != "cpu" or x.numel() < MIN_SIZE:
        return torch.relu_(F.batch_norm(x, mean, variance, weight, bias, True, momentum, eps))
    out: Tensor = _BatchNormRelu.apply(x, mean, variance, weight, bias, momentum, eps)  # type: ignore[no-untyped-call] # torch's
    return out


class _BatchNormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        out, *statistics = torch.native_batch_norm(
            x, weight, bias, mean, variance, True, momentum, eps
        )
        torch.relu_(out)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, *statistics, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad, (x, weight, mean, scale, out) = grads[0], ctx.saved_tensors
        relu_backward = torch.ops.aten.threshold_backward
        if torch.is_grad_enabled():  # for a gradient of the gradient
            grad = relu_backward(grad, out, 0)
        else:
            relu_backward.grad_input(grad, out, 0, grad_input=grad)
        needed = [ctx.needs_input_grad[index] for index in (0, 3, 4)]
        x_grad, weight_grad, bias_grad = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, None, None, mean, scale, True, ctx.eps, needed
        )
        return x_grad, None, None, weight_grad, bias_grad, None, None
