"""The masked reference's rules for operations that move, join or part values without computing."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from masked_rules import ALWAYS, Operation, Outcome, Value, bound, carry


def reshape(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Keep (batch, channel, …), or spread each channel over its features."""
    value, *rest = args
    if value.axis != 1:
        return None
    rest = [item.data if isinstance(item, Value) else item for item in rest]
    data = func(value.data.contiguous(), *rest, **kwargs)
    batch, size, *space = value.data.shape
    if data.shape[:2] == (batch, size):
        return carry(data, 1, value.channels)
    if data.shape == (batch, size * prod(space)):
        return carry(data, 1, [c for c in value.channels for _ in range(prod(space))])
    return None


def permute(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Move the channel axis, as long as the batch stays first."""
    value = args[0]
    # every axis of the probe has a size of its own, which tells where it went
    probe = torch.empty(list(range(2, 2 + value.data.ndim)), device="meta")
    sizes = list(func(probe, *args[1:], **kwargs).shape)
    if sizes[0] != 2:
        return None
    data = func(value.data, *args[1:], **kwargs)
    return carry(data, sizes.index(2 + value.axis), value.channels)


def expand(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Repeat along other axes, or one channel along its own."""
    value, *rest = args
    if value.axis is None:
        return None
    rest = [item.data if isinstance(item, Value) else item for item in rest]
    data = func(value.data, *rest, **kwargs)
    axis = value.axis + data.ndim - value.data.ndim
    return carry(data, axis, value.channels * (data.shape[axis] // len(value.channels)))


def part(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Cut along the channel axis into ranges, or along another one."""
    value = args[0]
    dim = bound("input size dim", args, kwargs).get("dim", 0) % value.data.ndim
    pieces, start = [], 0
    for data in func(value.data, *args[1:], **kwargs):
        stop = start + data.shape[dim]
        mine = value.channels[start:stop] if dim == value.axis else value.channels
        pieces.append(carry(data, value.axis, mine))
        start = stop
    return tuple(pieces)


def narrow(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Take a range of one axis."""
    named = bound("input dim start length", args, kwargs)
    value, dim = named["input"], named["dim"] % named["input"].data.ndim
    start = named["start"] % value.data.shape[dim]
    chosen = [slice(None)] * dim + [slice(start, start + named["length"])]
    return index(torch.Tensor.__getitem__, (value, tuple(chosen)), {})


def index(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Follow slices, new axes and whole numbers; any other index runs dense."""
    value, given = args
    items = list(given) if isinstance(given, tuple) else [given]
    if not all(item is None or item is ... or type(item) in (int, slice) for item in items):
        return None
    rest = slice(None)
    missing = value.data.ndim - sum(item is not None and item is not ... for item in items)
    at = items.index(...) if ... in items else len(items)
    items[at : at + 1] = [rest] * missing
    if not isinstance(items[0], slice):  # the batch must stay first
        return None
    old = new = 0
    for item in items:
        if old == value.axis and item is not None:
            break
        old += item is not None
        new += not isinstance(item, int)
    if not isinstance(item, slice):
        return None
    return carry(value.data[tuple(items)], new, value.channels[item])


def join(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Join channels, or values with the same channels along another axis."""
    named = bound("tensors dim", args, kwargs)
    values = [item if isinstance(item, Value) else Value(item) for item in named["tensors"]]
    masked = [value for value in values if value.axis is not None]
    dim = named.get("dim", 0) % masked[0].data.ndim
    data = func([value.data for value in values], dim)
    if all(value.axis == dim for value in masked):
        parts = (value.channels or (ALWAYS,) * value.data.shape[dim] for value in values)
        return carry(data, dim, [channel for part in parts for channel in part])
    first = values[0]
    if first.axis in (None, dim) or any(
        (value.axis, value.channels) != (first.axis, first.channels) for value in values
    ):
        return None
    return carry(data, first.axis, first.channels)
