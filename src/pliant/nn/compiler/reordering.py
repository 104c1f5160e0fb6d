"""Reorder the channels of a value, whose gradient is reordered back."""

from typing import Any

import torch
from torch import Tensor


def reorder(x: Tensor, axis: int, order: Tensor, inverse: Tensor) -> Tensor:
    """Return the channels in another order; `inverse` leads back."""
    result: Tensor = _Reorder.apply(x, axis, order, inverse)  # type: ignore[no-untyped-call] # torch's
    return result


class _Reorder(torch.autograd.Function):
    """A gather in both directions, as the gradient of `index_select` adds entry by entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.axis, ctx.inverse = axis, inverse
        return _select(x, axis, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _select(grad, ctx.axis, ctx.inverse), None, None, None


def _select(x: Tensor, axis: int, order: Tensor) -> Tensor:
    if axis == 1 and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)[..., order].permute(0, 3, 1, 2)
    return x.index_select(axis, order)
