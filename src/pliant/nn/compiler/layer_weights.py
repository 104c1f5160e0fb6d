"""Scale the weights of all layers, and convert their memory format, in one step of autograd.

One by one, this takes a node of autograd per layer, and the backward pass of a channels-last
convolution converts its weight again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Factor = Tensor | float | None  # None: 1
PreparedWeight = tuple[Tensor, Factor]  # and what is left to multiply the layer's input with


@dataclass(frozen=True)
class WeightRead:
    """A layer's weight, the query for its factors, and the input's positions per sample."""

    weight: str
    factors: int | None
    positions: float


def prepare_weights(
    reads: Sequence[WeightRead],
    params: Mapping[str, Tensor],
    results: Sequence[Any],
    batch: int,
    is_channels_last: bool,
) -> list[PreparedWeight]:
    """Return each layer's weight, scaled unless its input has fewer entries."""
    prepared: list[PreparedWeight] = []
    changes: dict[int, tuple[Tensor, Factor, torch.memory_format]] = {}
    for index, read in enumerate(reads):
        weight = params[read.weight]
        factor = None if read.factors is None else results[read.factors]
        is_kernel = is_channels_last and weight.dim() == 4
        memory_format = torch.channels_last if is_kernel else torch.contiguous_format
        is_input_smaller = batch * read.positions * weight.shape[1] < weight.numel()
        weight_factor, input_factor = (None, factor) if is_input_smaller else (factor, None)
        if weight_factor is not None or not weight.is_contiguous(memory_format=memory_format):
            changes[index] = weight, weight_factor, memory_format
        prepared.append((weight, input_factor))
    if changes:
        weights, factors, formats = zip(*changes.values(), strict=True)
        changed = _ChangeWeights.apply(factors, formats, *weights)  # type: ignore[no-untyped-call] # torch's
        for index, weight in zip(changes, changed, strict=True):
            prepared[index] = weight, prepared[index][1]
    return prepared


class _ChangeWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        factors: Sequence[Factor],
        formats: Sequence[torch.memory_format],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.factors = factors
        ctx.set_materialize_grads(False)  # a layer that does not reach the loss has no gradient
        changed = tuple(
            _scale(weight, factor).contiguous(memory_format=memory_format)
            for weight, factor, memory_format in zip(weights, factors, formats, strict=True)
        )
        needed = ctx.needs_input_grad[2:]  # else autograd would reach frozen layers too
        frozen = (
            weight for weight, is_needed in zip(changed, needed, strict=True) if not is_needed
        )
        ctx.mark_non_differentiable(*frozen)
        return changed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        pairs = zip(grads, ctx.factors, strict=True)
        scaled = (None if grad is None else _scale(grad, factor) for grad, factor in pairs)
        return None, None, *scaled


def _scale(tensor: Tensor, factor: Factor) -> Tensor:
    return tensor if factor is None else tensor * factor
