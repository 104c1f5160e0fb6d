"""Rules of the masked oracle for operations that move, join or split values."""

from collections.abc import Sequence
from typing import Any

import torch
from tests.nn.masked_rules import ALWAYS, Operation, Result, Value, bind_args, mask_channels


def reshape(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Find the axis along which the channels lie afterwards, if it is one."""
    value, *rest = args
    rest = [item.data if isinstance(item, Value) else item for item in rest]
    data = func(value.data.contiguous(), *rest, **kwargs)
    kinds, entries = list(value.channels), value.entries
    if value.axis is not None:
        kinds = list(dict.fromkeys(value.channels))
        numbers = torch.tensor([kinds.index(channel) for channel in value.channels])
        shape = [-1 if axis == value.axis else 1 for axis in range(value.data.ndim)]
        entries = numbers.view(shape).expand(value.data.shape)
    moved = func(entries.contiguous(), *rest, **kwargs)
    for axis in range(moved.ndim):
        rows = moved.movedim(axis, 0).reshape(moved.shape[axis], -1)
        if bool((rows == rows[:, :1]).all()):
            return mask_channels(data, axis, [kinds[number] for number in rows[:, 0].tolist()])
    return Value(data, None, tuple(kinds), moved)


def copy(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Keep all as it is."""
    value = args[0]
    return Value(func(value.data, *args[1:], **kwargs), value.axis, value.channels, value.entries)


def permute(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Move the channel axis."""
    value = args[0]
    if value.axis is None:
        return reshape(func, args, kwargs)
    # each axis of the probe has its own size, to find where it moved
    probe = torch.empty(list(range(2, 2 + value.data.ndim)), device="meta")
    sizes = list(func(probe, *args[1:], **kwargs).shape)
    data = func(value.data, *args[1:], **kwargs)
    return mask_channels(data, sizes.index(2 + value.axis), value.channels)


def expand(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Repeat other axes, or a single channel."""
    value, *rest = args
    if value.axis is None:
        return None
    rest = [item.data if isinstance(item, Value) else item for item in rest]
    data = func(value.data, *rest, **kwargs)
    axis = value.axis + data.ndim - value.data.ndim
    return mask_channels(data, axis, value.channels * (data.shape[axis] // len(value.channels)))


def split(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Split the channel axis into ranges, or split another axis."""
    value = args[0]
    dim = bind_args("input size dim", args, kwargs).get("dim", 0) % value.data.ndim
    parts, start = [], 0
    for data in func(value.data, *args[1:], **kwargs):
        stop = start + data.shape[dim]
        channels = value.channels[start:stop] if dim == value.axis else value.channels
        parts.append(mask_channels(data, value.axis, channels))
        start = stop
    return tuple(parts)


def narrow(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Slice one axis."""
    bound_args = bind_args("input dim start length", args, kwargs)
    value, dim = bound_args["input"], bound_args["dim"] % bound_args["input"].data.ndim
    start = bound_args["start"] % value.data.shape[dim]
    slices = [slice(None)] * dim + [slice(start, start + bound_args["length"])]
    return index(torch.Tensor.__getitem__, (value, tuple(slices)), {})


def index(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Follow slices, new axes and integers; any other index runs dense."""
    value, key = args
    items = list(key) if isinstance(key, tuple) else [key]
    if not all(item is None or item is ... or type(item) in (int, slice) for item in items):
        return None
    everything = slice(None)
    missing = value.data.ndim - sum(item is not None and item is not ... for item in items)
    position = items.index(...) if ... in items else len(items)
    items[position : position + 1] = [everything] * missing
    old = new = 0
    for item in items:
        if old == value.axis and item is not None:
            break
        old += item is not None
        new += not isinstance(item, int)
    if not isinstance(item, slice):
        return None
    return mask_channels(value.data[tuple(items)], new, value.channels[item])


def concatenate(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Concatenate channels, or values with the same channels along another axis."""
    bound_args = bind_args("tensors dim", args, kwargs)
    values = [item if isinstance(item, Value) else Value(item) for item in bound_args["tensors"]]
    masked = [value for value in values if value.axis is not None]
    dim = bound_args.get("dim", 0) % masked[0].data.ndim
    data = func([value.data for value in values], dim)
    if all(value.axis == dim for value in masked):
        parts = (value.channels or (ALWAYS,) * value.data.shape[dim] for value in values)
        return mask_channels(data, dim, [channel for part in parts for channel in part])
    first = masked[0]
    # a parameter, such as a class token, has the channels that it joins
    inputs = [item for item in bound_args["tensors"] if isinstance(item, Value)]
    if first.axis == dim or any(
        (value.axis, value.channels) != (first.axis, first.channels) for value in inputs
    ):
        return None
    return mask_channels(data, first.axis, first.channels)


def unbind(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Take every entry along an axis other than the channels."""
    value = args[0]
    dim = bind_args("input dim", args, kwargs).get("dim", 0) % value.data.ndim
    if dim == value.axis:
        return None
    axis = value.axis - (dim < value.axis)
    return tuple(mask_channels(data, axis, value.channels) for data in value.data.unbind(dim))
