"""The rules of the masked reference: what each operation does to channels that may be absent.

A rule takes the operation and its arguments, with a `Value` for each value of the network, and
returns a `Value` (or several), or None where it does not apply: then the operation runs dense.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Channel(NamedTuple):
    """What is known of a channel: is it there, whose draw said so, which (site, scale) are owed."""

    present: bool
    key: Hashable
    pending: frozenset[tuple[int, float]]


ALWAYS = Channel(present=True, key="always", pending=frozenset())


@dataclass(frozen=True)
class Value:
    """A full-size tensor; absent channels hold zeros; a dense one has no channel axis."""

    data: Tensor
    axis: int | None = None
    channels: tuple[Channel, ...] = ()


Outcome = Value | tuple[Value, ...] | None
Operation = Callable[..., Any]


def along(vector: Tensor, axis: int, ndim: int) -> Tensor:
    """Shape a vector over channels so that it broadcasts along the channel axis."""
    return vector.view([-1 if position == axis else 1 for position in range(ndim)])


def presence(value: Value) -> Tensor:
    """Return the mask of a value, ready to broadcast."""
    assert value.axis is not None
    there = torch.tensor([c.present for c in value.channels], device=value.data.device)
    return along(there, value.axis, value.data.ndim)


def carry(data: Tensor, axis: int, channels: Sequence[Channel]) -> Value:
    """Make a value with these channels: what an operation put into absent ones is wiped out."""
    assert data.shape[axis] == len(channels)
    if all(channel == ALWAYS for channel in channels):
        return Value(data)
    value = Value(data, axis, tuple(channels))
    # where, not a product: an infinite or undefined entry of an absent channel must vanish as well
    return Value(torch.where(presence(value), data, 0), axis, tuple(channels))


def filled(value: Value) -> Tensor:
    """Return the unscaled data, with ones in absent channels: one may divide by them."""
    return value.data if value.axis is None else torch.where(presence(value), value.data, 1)


def dense(value: Value) -> Tensor:
    """Return the data with all owed factors paid and zeros for absent channels."""
    if value.axis is None:
        return value.data
    owed = [prod(s for _, s in c.pending) if c.present else 0.0 for c in value.channels]
    factor = torch.tensor(owed, dtype=torch.float64, device=value.data.device)
    return value.data * along(factor.to(value.data.dtype), value.axis, value.data.ndim)


def either(one: Channel, other: Channel) -> Channel:
    """Join two draws of which one is enough; what is owed has been paid before."""
    if "always" in (one.key, other.key):
        return ALWAYS
    key = _joined("any", one.key, other.key)
    return Channel(one.present or other.present, key, frozenset())


def both(one: Channel, other: Channel) -> Channel:
    """Join two draws that must both be there."""
    key = _joined("all", one.key, other.key)
    return Channel(one.present and other.present, key, one.pending | other.pending)


def _joined(how: str, *keys: Hashable) -> Hashable:
    parts: set[Hashable] = set()
    for key in keys:
        flat = isinstance(key, tuple) and key[0] == how
        parts |= key[1] if flat else {key}  # type: ignore[index]  # a joined key is (how, parts)
    if how == "all":
        parts.discard("always")
    if len(parts) < 2:
        return parts.pop() if parts else "always"
    return (how, frozenset(parts))


def bound(names: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name positional arguments as the operation's signature does."""
    order = names.split()
    return dict(zip(order, args, strict=False)) | {k: v for k, v in kwargs.items() if k in order}


def _aligned(a: Value, b: Value) -> tuple[int, list[Channel], list[Channel]] | None:
    """Line two values up as broadcasting does; None if their channels lie on different axes."""
    shape = torch.broadcast_shapes(a.data.shape, b.data.shape)
    axes = {v.axis - v.data.ndim for v in (a, b) if v.axis is not None}
    if len(axes) != 1:
        return None
    axis = axes.pop() + len(shape)
    size = shape[axis]
    one, other = (
        [ALWAYS] * size if v.axis is None else list(v.channels) * (size // len(v.channels))
        for v in (a, b)
    )
    return axis, one, other


def arithmetic(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Add, subtract, multiply, divide or raise: by a number, a parameter, or another value."""
    kind = func.__name__.strip("_")
    named = ("other", "exponent")
    a, b = (*args, *(kwargs[name] for name in named if name in kwargs))
    kwargs = {name: given for name, given in kwargs.items() if name not in named}
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return _affine(func, a, b, kwargs)
    lines = _aligned(a, b)
    if lines is None:
        return None
    axis, one, other = lines
    if kind in ("mul", "multiply"):
        joined = [both(x, y) for x, y in zip(one, other, strict=True)]
        return carry(func(a.data, b.data, **kwargs), axis, joined)
    if kind in ("add", "sub", "subtract"):
        if one == other:  # the same draw counts once, and its factor stays owed
            return carry(func(a.data, b.data, **kwargs), axis, one)
        joined = [either(x, y) for x, y in zip(one, other, strict=True)]
        return carry(func(dense(a), dense(b), **kwargs), axis, joined)
    if kind in ("div", "divide", "true_divide") and one == other:
        return carry(func(a.data, filled(b), **kwargs), axis, one)
    return None


def _affine(func: Operation, a: Any, b: Any, kwargs: dict[str, Any]) -> Outcome:
    value = a if isinstance(a, Value) else b
    assert value.axis is not None
    sides = [filled(side) if isinstance(side, Value) else side for side in (a, b)]
    data = func(*sides, **kwargs)
    axis = value.axis + data.ndim - value.data.ndim
    # a parameter that widens one channel into many is no norm layer's affine
    return carry(data, axis, value.channels) if data.shape[axis] == len(value.channels) else None


def elementwise(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Act on each channel alone, unscaled."""
    value, *rest = args
    data = func(filled(value), *(r.data if isinstance(r, Value) else r for r in rest), **kwargs)
    return carry(data, value.axis, value.channels)


def prelu(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Act as an activation if there is one slope, or one for each of the value's own channels."""
    slopes = bound("input weight", args, kwargs)["weight"]
    return elementwise(func, args, kwargs) if slopes.numel() == 1 or args[0].axis == 1 else None


def pooling(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Pool the last one, two or three axes."""
    value = args[0]
    spatial = int(func.__name__[-2])
    return elementwise(func, args, kwargs) if value.axis < value.data.ndim - spatial else None


def interpolate(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Resample what follows the channel axis."""
    return elementwise(func, args, kwargs) if args[0].axis == 1 else None


def pad(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Pad axes behind the channels."""
    value, sides = args[0], bound("input pad", args, kwargs)["pad"]
    return (
        elementwise(func, args, kwargs) if value.axis < value.data.ndim - len(sides) // 2 else None
    )


def reduction(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Reduce axes other than batch and channel."""
    value, named = args[0], bound("input dim keepdim", args, kwargs)
    if named.get("dim") is None:
        return None
    given = named["dim"] if isinstance(named["dim"], Sequence) else [named["dim"]]
    dims = {dim % value.data.ndim for dim in given}
    if not dims or dims & {0, value.axis}:
        return None
    gone = 0 if named.get("keepdim") else sum(dim < value.axis for dim in dims)
    return carry(func(filled(value), *args[1:], **kwargs), value.axis - gone, value.channels)


def batch_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Normalise each channel by its own statistics; those of absent channels stay as they were."""
    value = args[0]
    if (
        value.axis != 1 or func is not F.batch_norm
    ):  # torch.batch_norm has another order of arguments
        return None
    order = "input running_mean running_var weight bias training momentum eps"
    named = bound(order, args, kwargs)
    buffers = [named.get("running_mean"), named.get("running_var")]
    # copies, because writing the originals back would spoil what autograd has saved of them
    fresh = [None if buffer is None else buffer.clone() for buffer in buffers]
    named |= {"input": value.data, "running_mean": fresh[0], "running_var": fresh[1]}
    data = func(**named)
    there = torch.tensor([c.present for c in value.channels], device=data.device)
    with torch.no_grad():
        for old, new in zip(buffers, fresh, strict=True):
            if old is not None:
                old.copy_(torch.where(there, new, old))
    return carry(data, 1, value.channels)


def instance_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Normalise each channel of each sample, unless statistics are gathered."""
    gathers = bound("input running_mean", args, kwargs).get("running_mean") is not None
    return elementwise(func, args, kwargs) if args[0].axis == 1 and not gathers else None


def _standardise(data: Tensor, there: Tensor, dims: list[int], eps: float) -> Tensor:
    there = there.expand_as(data).to(data.dtype)
    count = there.sum(dims, keepdim=True).clamp(min=1)
    centred = (data - (data * there).sum(dims, keepdim=True) / count) * there
    return centred / (centred.square().sum(dims, keepdim=True) / count + eps).sqrt()


def group_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Take each group's statistics over those of its members that are there."""
    named = bound("input num_groups weight bias eps", args, kwargs)
    value, weight, bias = named["input"], named.get("weight"), named.get("bias")
    if value.axis != 1:
        return None
    data = value.data
    grouped = (data.shape[0], named["num_groups"], -1)
    there = presence(value).expand_as(data).reshape(grouped)
    data = _standardise(data.reshape(grouped), there, [2], named.get("eps", 1e-5)).view_as(data)
    data = data if weight is None else data * along(weight, 1, data.ndim)
    data = data if bias is None else data + along(bias, 1, data.ndim)
    return carry(data, 1, value.channels)


def layer_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Take statistics over the channels that are there, if channels are mixed at all."""
    named = bound("input normalized_shape weight bias eps", args, kwargs)
    value, weight, bias = named["input"], named.get("weight"), named.get("bias")
    first = value.data.ndim - len(named["normalized_shape"])
    if value.axis < first:
        return elementwise(func, args, kwargs)
    dims = range(first, value.data.ndim)
    data = _standardise(value.data, presence(value), list(dims), named.get("eps", 1e-5))
    data = data if weight is None else data * weight
    data = data if bias is None else data + bias
    return carry(data, value.axis, value.channels)


def local_response_norm(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
    """Keep windows at the original positions, where absent channels count as zeros."""
    value = args[0]
    if value.axis != 1:
        return None
    return carry(func(value.data, *args[1:], **kwargs), 1, value.channels)
