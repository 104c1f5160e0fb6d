"""Rules for layers with parameters: convolutions, linear layers and norms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant.nn import channels, response
from pliant.nn.channels import Layout, Piece, Pieces
from pliant.nn.lower import Builder, along, drawn
from pliant.nn.plan import Bound, Environment, Frame
from pliant.nn.trace import BATCH

CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Convolution:
    """A convolution, from a module or from a functional call."""

    source: fx.Node
    function: Callable[..., Tensor]
    weight: str
    bias: str | None
    options: tuple[Any, ...]  # stride, padding, dilation
    groups: int
    around: tuple[str, Sequence[int]] | None = None  # padding mode and widths, unless zeros


def convolution(b: Builder, node: fx.Node, conv: Convolution) -> bool:
    """Lay out a convolution; False where it must be left to the general rule."""
    source, outputs = conv.source, node.meta["value"].shape[1]
    shape = source.meta["value"].shape
    kernel = b.shape(conv.weight)[2:]
    spatial = prod(node.meta["value"].shape[2:])
    depthwise = conv.groups == shape[1] and conv.groups > 1
    if conv.groups != 1 and not depthwise:
        return False
    layout = b.layout(source)
    if layout and (layout.axis != 1 or b.is_rigid(conv.weight)):
        why = (
            "a parameter is used in two ways" if layout.axis == 1 else "its channels lie elsewhere"
        )
        slot, layout = b.dense(source, node.name, why), None
    else:
        slot = b.slot(source)
    read = layout.pieces if layout else (Piece(shape[1]),)
    factors: int | None = None
    if depthwise:
        many = outputs // shape[1]
        made = tuple(Piece(p.size, p.expression, p.repeat * many, p.pending) for p in read)
        result = Layout(1, made) if layout else None
        b.claim(conv.weight, made)
        b.work(node, conv.weight, made, None, prod(kernel) * spatial)
    else:
        site = b.site(conv.weight)
        result = drawn(site, outputs, 1) if site is not None else None
        made = result.pieces if result else (Piece(outputs),)
        factors = b.ask_factors(read, (1, -1, *([1] * len(kernel))))
        b.claim(conv.weight, made, read)
        b.work(node, conv.weight, made, read, prod(kernel) * spatial)
    b.claim(conv.bias, made)
    b.learn(node, conv.weight, conv.bias)
    function, weight, bias, options = conv.function, conv.weight, conv.bias, conv.options
    around = conv.around
    steps = _skipped(kernel, options)
    if steps is not None:
        options = (1, 0, 1)

    def run(environment: Environment, bound: Bound) -> Tensor:
        x, w = environment[slot], bound.params[weight]
        if factors is not None and (factor := bound.answers[factors]) is not None:
            x, w = _scaled(x, w, factor)
        if around is not None:
            x = F.pad(x, around[1], mode=around[0])
        if steps is not None:
            x = x[steps]
        add = bound.params[bias] if bias is not None else None
        return function(x, w, add, *options, x.shape[1] if depthwise else 1)

    b.emit(node, run, [slot], result)
    return True


def _scaled(x: Tensor, w: Tensor, factor: Any) -> tuple[Tensor, Tensor]:
    """Apply pending factors to the input channels of whichever is smaller: values or weights."""
    return (x * factor, w) if x.numel() < w.numel() else (x, w * factor)


def _skipped(kernel: Sequence[int], options: tuple[Any, ...]) -> tuple[slice, ...] | None:
    """Return the pixels that a strided 1x1 convolution reads, so that it need not stride.

    oneDNN's backward pass of such a convolution writes past its buffers in channels-last format
    when channels are not a multiple of eight (seen with torch 2.13 on AVX2).
    """
    stride, padding, _ = options
    strides = [stride] * len(kernel) if isinstance(stride, int) else list(stride)
    pads = [padding] if isinstance(padding, int | str) else list(padding)
    if any(size != 1 for size in kernel) or any(pad not in {0, "valid"} for pad in pads):
        return None
    if all(step == 1 for step in strides):
        return None
    return (slice(None), slice(None), *(slice(None, None, step) for step in strides))


def linear(b: Builder, node: fx.Node, source: fx.Node, weight: str, bias: str | None) -> bool:
    """Lay out a linear layer on the last axis."""
    value, last = node.meta["value"], node.meta["value"].dim() - 1
    layout = b.layout(source)
    if layout and (layout.axis != last or b.is_rigid(weight)):
        why = "it mixes another axis" if layout.axis != last else "a parameter has two uses"
        slot, layout = b.dense(source, node.name, why), None
    else:
        slot = b.slot(source)
    read = layout.pieces if layout else (Piece(source.meta["value"].shape[-1]),)
    site = b.site(weight)
    result = drawn(site, value.shape[-1], last) if site is not None else None
    made = result.pieces if result else (Piece(value.shape[-1]),)
    factors = b.ask_factors(read, (1, -1))
    b.claim(weight, made, read)
    b.claim(bias, made)
    b.work(node, weight, made, read, prod(value.shape[:-1]) // BATCH)
    b.learn(node, weight, bias)

    def run(environment: Environment, bound: Bound) -> Tensor:
        x, w = environment[slot], bound.params[weight]
        if factors is not None and (factor := bound.answers[factors]) is not None:
            x, w = _scaled(x, w, factor)
        return F.linear(x, w, bound.params[bias] if bias is not None else None)

    b.emit(node, run, [slot], result)
    return True


@dataclass(frozen=True)
class Norm:
    """What the norm layers have in common."""

    source: fx.Node
    weight: str | None
    bias: str | None
    eps: float


def batch_norm(
    b: Builder,
    node: fx.Node,
    norm: Norm,
    statistics: tuple[str | None, str | None, str | None],  # mean, variance, number of batches
    momentum: float | None,
) -> bool:
    """Lay out batch norm: each channel by itself, absent ones untouched."""
    mean, variance, batches = statistics
    slot, layout = _channelwise(b, node, norm, 1, mean, variance)
    pieces = layout.pieces if layout else None
    for name in (norm.weight, norm.bias, mean, variance):
        b.claim(name, pieces)
    b.claim(batches)
    b.learn(node, norm.weight, norm.bias)
    weight, bias, eps = norm.weight, norm.bias, norm.eps

    def run(environment: Environment, bound: Bound) -> Tensor:
        params = bound.params
        share = momentum
        if batches is not None:
            params[batches].add_(1)
            if share is None:
                share = 1.0 / float(params[batches])
        return F.batch_norm(
            environment[slot],
            params[mean] if mean is not None else None,
            params[variance] if variance is not None else None,
            params[weight] if weight is not None else None,
            params[bias] if bias is not None else None,
            True,
            share or 0.0,
            eps,
        )

    b.emit(node, run, [slot], layout)
    return True


def instance_norm(b: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lay out instance norm: each channel of each sample by itself."""
    slot, layout = _channelwise(b, node, norm, 1)
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    for name in (weight, bias):
        b.claim(name, layout.pieces if layout else None)
    b.learn(node, weight, bias)

    def run(environment: Environment, bound: Bound) -> Tensor:
        w = bound.params[weight] if weight is not None else None
        add = bound.params[bias] if bias is not None else None
        return F.instance_norm(environment[slot], None, None, w, add, True, 0.0, eps)

    b.emit(node, run, [slot], layout)
    return True


def group_norm(b: Builder, node: fx.Node, norm: Norm, groups: int) -> bool:
    """Lay out group norm: statistics over the members of each group that are there."""
    slot, layout = _channelwise(b, node, norm, 1)
    pieces = layout.pieces if layout else None
    b.claim(norm.weight, pieces)
    b.claim(norm.bias, pieces)
    b.learn(node, norm.weight, norm.bias)
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    asked = b.ask(lambda frame: _members(frame, layout.pieces, groups)) if layout else None

    def run(environment: Environment, bound: Bound) -> Tensor:
        w = bound.params[weight] if weight is not None else None
        add = bound.params[bias] if bias is not None else None
        members = bound.answers[asked] if asked is not None else groups
        if isinstance(members, int):
            return F.group_norm(environment[slot], members, w, add, eps)
        group, number = members
        return unequal_group_norm(environment[slot], group, number, w, add, eps)

    b.emit(node, run, [slot], layout)
    return True


def _members(frame: Frame, pieces: Pieces, groups: int) -> int | tuple[Tensor, Tensor]:
    """Return the number of groups where all kept equally many, else who is in which group."""
    kept = frame.kept(pieces)
    group = kept // (channels.width(pieces) // groups)
    there, place, number = np.unique(group, return_inverse=True, return_counts=True)
    if len(set(number.tolist())) == 1:
        return len(there)
    return frame.index(place), frame.numbers(number.astype(np.float64), (1, -1))


def unequal_group_norm(
    x: Tensor, group: Tensor, number: Tensor, w: Tensor | None, add: Tensor | None, eps: float
) -> Tensor:
    """Normalise groups of unequal size; `group` says where each channel belongs."""
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    total = number * flat.shape[2]
    empty = flat.new_zeros(flat.shape[0], number.shape[1])
    mean = empty.index_add(1, group, flat.sum(2)) / total
    centred = flat - mean[:, group].unsqueeze(2)
    variance = empty.index_add(1, group, centred.square().sum(2)) / total
    out = (centred * (variance + eps).rsqrt()[:, group].unsqueeze(2)).view_as(x)
    shape = along(1, x.dim())
    out = out * w.view(shape) if w is not None else out
    return out + add.view(shape) if add is not None else out


def layer_norm(b: Builder, node: fx.Node, norm: Norm, normal: Sequence[int]) -> bool:
    """Lay out layer norm: over the channels that are there, or beside them."""
    dims = node.meta["value"].dim()
    begin = dims - len(normal)
    layout = b.layout(norm.source)
    mixes = layout is not None and layout.axis >= begin
    slot, layout = _channelwise(b, node, norm, layout.axis if layout else 1)
    follows = [
        layout.pieces if layout and mixes and begin + d == layout.axis else None
        for d in range(len(normal))
    ]
    b.claim(norm.weight, *follows)
    b.claim(norm.bias, *follows)
    b.learn(node, norm.weight, norm.bias)
    weight, bias, eps = norm.weight, norm.bias, norm.eps

    def run(environment: Environment, bound: Bound) -> Tensor:
        x = environment[slot]
        w = bound.params[weight] if weight is not None else None
        add = bound.params[bias] if bias is not None else None
        return F.layer_norm(x, x.shape[begin:], w, add, eps)

    b.emit(node, run, [slot], layout)
    return True


def local_response_norm(
    b: Builder, node: fx.Node, source: fx.Node, size: int, options: tuple[float, float, float]
) -> bool:
    """Lay out local response norm: neighbours at their places in the full network."""
    layout, (alpha, beta, k) = b.layout(source), options
    if layout is None or layout.axis != 1:
        return False
    slot = b.slot(source)
    asked = b.ask(lambda frame: _neighbours(frame, layout.pieces, size))
    b.learn(node)

    def run(environment: Environment, bound: Bound) -> Tensor:
        x = environment[slot]
        if bound.answers[asked] is None:
            return response.local_response_norm(x, size, alpha, beta, k)
        square = x.square()
        padded = F.pad(
            square, [0, 0] * (x.dim() - 2) + [0, 1]
        )  # a channel of zeros behind the last
        total = square
        for places in bound.answers[asked]:
            total = total + padded.index_select(1, places)
        out: Tensor = x / (total * (alpha / size) + k).pow(beta)
        return out

    b.emit(node, run, [slot], layout)
    return True


def _neighbours(frame: Frame, pieces: Pieces, size: int) -> list[Tensor] | None:
    kept = frame.kept(pieces)
    if len(kept) == channels.width(pieces):
        return None  # all are there
    place = np.full(channels.width(pieces) + 2 * size, len(kept))
    place[kept + size] = np.arange(len(kept))
    offsets = [o for o in range(-(size // 2), (size - 1) // 2 + 1) if o]
    return [frame.index(place[kept + size + offset]) for offset in offsets]


def prelu(b: Builder, node: fx.Node, source: fx.Node, weight: str) -> bool:
    """Lay out PReLU with one slope for all or one for each channel."""
    norm = Norm(source, weight, None, 0.0)
    slot, layout = _channelwise(b, node, norm, 1)
    b.claim(weight, layout.pieces if layout and b.shape(weight)[0] > 1 else None)
    b.learn(node, weight)
    b.emit(
        node,
        lambda environment, bound: F.prelu(environment[slot], bound.params[weight]),
        [slot],
        layout,
    )
    return True


def _channelwise(
    b: Builder, node: fx.Node, norm: Norm, axis: int, *more: str | None
) -> tuple[int, Layout | None]:
    """Return the slot and layout that a layer with one parameter per channel reads."""
    layout = b.layout(norm.source)
    if layout and (layout.axis != axis or b.is_rigid(norm.weight, norm.bias, *more)):
        return b.dense(norm.source, node.name, "its parameters read all channels"), None
    return b.slot(norm.source), layout
