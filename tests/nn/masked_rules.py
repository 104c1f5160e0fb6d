"""Rules of the masked oracle: the effect of each operation on channels that may be absent.

A rule takes an operation and its arguments, and returns one `Value` or several. None means that it
does not apply, and the operation runs dense.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Channel(NamedTuple):
    """Whether a channel is present, which masks decide that, and its pending (site, scale)."""

    present: bool
    key: Hashable
    pending: frozenset[tuple[int, float]]


ALWAYS = Channel(present=True, key="always", pending=frozenset())


@dataclass(frozen=True)
class Value:
    """A full-size tensor with zeros in absent channels; a dense one has no channel axis.

    Between the reshapes of a channel shuffle, channels lie along several axes: `entries` has the
    channel of every entry.
    """

    data: Tensor
    axis: int | None = None
    channels: tuple[Channel, ...] = ()
    entries: Tensor | None = None


Result = Value | tuple[Value, ...] | None
Operation = Callable[..., Any]


def broadcast_along(vector: Tensor, axis: int, ndim: int) -> Tensor:
    """Reshape a vector over channels to broadcast along the channel axis."""
    return vector.view([-1 if position == axis else 1 for position in range(ndim)])


def presence_mask(value: Value) -> Tensor:
    """Return the mask of a value, shaped to broadcast."""
    assert value.axis is not None
    mask = torch.tensor([c.present for c in value.channels], device=value.data.device)
    return broadcast_along(mask, value.axis, value.data.ndim)


def mask_channels(data: Tensor, axis: int, channels: Sequence[Channel]) -> Value:
    """Make a value with these channels, setting absent ones to zero."""
    assert data.shape[axis] == len(channels)
    if all(channel == ALWAYS for channel in channels):
        return Value(data)
    value = Value(data, axis, tuple(channels))
    # `where`, not a product, to remove infinite and undefined entries too
    return Value(torch.where(presence_mask(value), data, 0), axis, tuple(channels))


def fill_absent(value: Value) -> Tensor:
    """Return the unscaled data with ones in absent channels, safe to divide by."""
    return value.data if value.axis is None else torch.where(presence_mask(value), value.data, 1)


def to_dense(value: Value) -> Tensor:
    """Return the data with all pending factors applied."""
    if value.axis is None and value.entries is None:
        return value.data
    factors = [prod(s for _, s in c.pending) if c.present else 0.0 for c in value.channels]
    factor = torch.tensor(factors, dtype=torch.float64, device=value.data.device)
    if value.axis is None:
        return value.data * factor[value.entries].to(value.data.dtype)
    return value.data * broadcast_along(factor.to(value.data.dtype), value.axis, value.data.ndim)


def union(left: Channel, right: Channel) -> Channel:
    """Combine channels that are present if either is; factors are already applied."""
    if "always" in (left.key, right.key):
        return ALWAYS
    key = _join_keys("any", left.key, right.key)
    return Channel(left.present or right.present, key, frozenset())


def intersect(left: Channel, right: Channel) -> Channel:
    """Combine channels that are present if both are."""
    key = _join_keys("all", left.key, right.key)
    return Channel(left.present and right.present, key, left.pending | right.pending)


def _join_keys(kind: str, *keys: Hashable) -> Hashable:
    parts: set[Hashable] = set()
    for key in keys:
        is_same_kind = isinstance(key, tuple) and key[0] == kind
        parts |= key[1] if is_same_kind else {key}  # type: ignore[index]  # a joined key is (kind, parts)
    if kind == "all":
        parts.discard("always")
    if len(parts) < 2:
        return parts.pop() if parts else "always"
    return (kind, frozenset(parts))


def bind_args(names: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name."""
    parameters = names.split()
    return dict(zip(parameters, args, strict=False)) | {
        name: argument for name, argument in kwargs.items() if name in parameters
    }


def _align(a: Value, b: Value) -> tuple[int, list[Channel], list[Channel]] | None:
    """Broadcast the channels of two values; None if they are on different axes."""
    shape = torch.broadcast_shapes(a.data.shape, b.data.shape)
    axes = {v.axis - v.data.ndim for v in (a, b) if v.axis is not None}
    if len(axes) != 1:
        return None
    axis = axes.pop() + len(shape)
    size = shape[axis]
    left, right = (
        [ALWAYS] * size if v.axis is None else list(v.channels) * (size // len(v.channels))
        for v in (a, b)
    )
    return axis, left, right


def arithmetic(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Add, subtract, multiply, divide or raise by a number, a parameter or another value."""
    kind = func.__name__.strip("_")
    operands = ("other", "exponent")
    a, b = (*args, *(kwargs[name] for name in operands if name in kwargs))
    kwargs = {name: argument for name, argument in kwargs.items() if name not in operands}
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return _scale_or_shift(func, a, b, kwargs)
    alignment = _align(a, b)
    if alignment is None:
        return None
    axis, left, right = alignment
    if kind in ("mul", "multiply"):
        channels = [intersect(x, y) for x, y in zip(left, right, strict=True)]
        return mask_channels(func(a.data, b.data, **kwargs), axis, channels)
    if kind in ("add", "sub", "subtract"):
        if left == right:  # the same masks: the factor stays pending
            return mask_channels(func(a.data, b.data, **kwargs), axis, left)
        channels = [union(x, y) for x, y in zip(left, right, strict=True)]
        return mask_channels(func(to_dense(a), to_dense(b), **kwargs), axis, channels)
    if kind in ("div", "divide", "true_divide") and (left == right or b.axis is None):
        return mask_channels(func(a.data, fill_absent(b), **kwargs), axis, left)
    return None


def _scale_or_shift(func: Operation, a: Any, b: Any, kwargs: dict[str, Any]) -> Result:
    value = a if isinstance(a, Value) else b
    assert value.axis is not None
    sides = [fill_absent(side) if isinstance(side, Value) else side for side in (a, b)]
    data = func(*sides, **kwargs)
    axis = value.axis + data.ndim - value.data.ndim
    # unless a parameter widens one channel into many
    return (
        mask_channels(data, axis, value.channels)
        if data.shape[axis] == len(value.channels)
        else None
    )


def elementwise(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Apply to each channel alone, unscaled."""
    value, *rest = args
    data = func(
        fill_absent(value), *(r.data if isinstance(r, Value) else r for r in rest), **kwargs
    )
    return mask_channels(data, value.axis, value.channels)


def prelu(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Apply as an activation, if there is one slope or one per channel of the value."""
    slopes = bind_args("input weight", args, kwargs)["weight"]
    return elementwise(func, args, kwargs) if slopes.numel() == 1 or args[0].axis == 1 else None


def pooling(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Pool the last one, two or three axes, if they are not the channels."""
    value = args[0]
    spatial = int(func.__name__[-2])
    return elementwise(func, args, kwargs) if value.axis < value.data.ndim - spatial else None


def interpolate(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Resample the axes after the channels."""
    return elementwise(func, args, kwargs) if args[0].axis == 1 else None


def pad(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Pad the axes after the channels."""
    value, sides = args[0], bind_args("input pad", args, kwargs)["pad"]
    return (
        elementwise(func, args, kwargs) if value.axis < value.data.ndim - len(sides) // 2 else None
    )


def reduction(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Reduce axes other than batch and channel."""
    value, bound_args = args[0], bind_args("input dim keepdim", args, kwargs)
    if bound_args.get("dim") is None:
        return None
    axes = bound_args["dim"] if isinstance(bound_args["dim"], Sequence) else [bound_args["dim"]]
    dims = {dim % value.data.ndim for dim in axes}
    if not dims or dims & {0, value.axis}:
        return None
    num_removed = 0 if bound_args.get("keepdim") else sum(dim < value.axis for dim in dims)
    return mask_channels(
        func(fill_absent(value), *args[1:], **kwargs), value.axis - num_removed, value.channels
    )


def batch_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Normalise each channel, without updating the statistics of absent ones."""
    if args[0].axis != 1 or func is not F.batch_norm:  # torch.batch_norm has another signature
        return None
    signature = "input running_mean running_var weight bias training momentum eps"
    return _normalise(func, bind_args(signature, args, kwargs))


def instance_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Normalise each channel of each sample, tracking the statistics of present ones."""
    signature = "input running_mean running_var weight bias use_input_stats momentum eps"
    return _normalise(func, bind_args(signature, args, kwargs)) if args[0].axis == 1 else None


def _normalise(func: Operation, bound_args: dict[str, Any]) -> Value:
    value = bound_args["input"]
    buffers = [bound_args.get("running_mean"), bound_args.get("running_var")]
    # copies, because autograd has saved the originals
    updated = [None if buffer is None else buffer.clone() for buffer in buffers]
    bound_args |= {"input": value.data, "running_mean": updated[0], "running_var": updated[1]}
    data = func(**bound_args)
    mask = torch.tensor([c.present for c in value.channels], device=data.device)
    with torch.no_grad():
        for old, new in zip(buffers, updated, strict=True):
            if old is not None:
                old.copy_(torch.where(mask, new, old))
    return mask_channels(data, 1, value.channels)


def _standardise(data: Tensor, mask: Tensor, dims: list[int], eps: float) -> Tensor:
    mask = mask.expand_as(data).to(data.dtype)
    count = mask.sum(dims, keepdim=True).clamp(min=1)
    centred = (data - (data * mask).sum(dims, keepdim=True) / count) * mask
    return centred / (centred.square().sum(dims, keepdim=True) / count + eps).sqrt()


def group_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Normalise each group by the statistics of its present channels."""
    bound_args = bind_args("input num_groups weight bias eps", args, kwargs)
    value, weight, bias = bound_args["input"], bound_args.get("weight"), bound_args.get("bias")
    if value.axis != 1:
        return None
    data = value.data
    grouped = (data.shape[0], bound_args["num_groups"], -1)
    mask = presence_mask(value).expand_as(data).reshape(grouped)
    data = _standardise(data.reshape(grouped), mask, [2], bound_args.get("eps", 1e-5)).view_as(data)
    data = data if weight is None else data * broadcast_along(weight, 1, data.ndim)
    data = data if bias is None else data + broadcast_along(bias, 1, data.ndim)
    return mask_channels(data, 1, value.channels)


def layer_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Normalise by the statistics of present channels, if channels are mixed."""
    bound_args = bind_args("input normalized_shape weight bias eps", args, kwargs)
    value, weight, bias = bound_args["input"], bound_args.get("weight"), bound_args.get("bias")
    first = value.data.ndim - len(bound_args["normalized_shape"])
    if value.axis < first:
        return elementwise(func, args, kwargs)
    dims = range(first, value.data.ndim)
    data = _standardise(value.data, presence_mask(value), list(dims), bound_args.get("eps", 1e-5))
    data = data if weight is None else data * weight
    data = data if bias is None else data + bias
    return mask_channels(data, value.axis, value.channels)


def local_response_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Normalise over windows of the full network, with absent channels as zeros."""
    value = args[0]
    if value.axis != 1:
        return None
    return mask_channels(func(value.data, *args[1:], **kwargs), 1, value.channels)
