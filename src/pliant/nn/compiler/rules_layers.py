"""Rules for layers with parameters: convolutions, linear layers and norms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant.nn.compiler import channels, fast_lrn
from pliant.nn.compiler.builder import (
    InstructionFn,
    ProgramBuilder,
    broadcast_shape,
    make_site_layout,
)
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans
from pliant.nn.compiler.program import BoundProgram, ChannelIndex, Environment
from pliant.nn.compiler.trace import BATCH

CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TWO_USES, OTHER_AXIS = "a parameter is used in two ways", "its channels are on another axis"


@dataclass(frozen=True)
class Convolution:
    """A convolution, from a module or from a functional call."""

    source: fx.Node
    function: Callable[..., Tensor]
    weight: str
    bias: str | None
    options: tuple[Any, ...]  # stride, padding, dilation
    groups: int
    explicit_padding: tuple[str, Sequence[int]] | None = None  # mode and widths, unless zeros


def lower_convolution(builder: ProgramBuilder, node: fx.Node, conv: Convolution) -> bool:
    """Lower a convolution; False for one with groups that is not depthwise."""
    source, inputs = conv.source, conv.source.meta["value"].shape[1]
    is_depthwise = conv.groups == inputs and conv.groups > 1
    if conv.groups != 1 and not is_depthwise:
        return False
    layout = builder.layout(source)
    if layout and (layout.axis != 1 or builder.is_unsliced(conv.weight)):
        why = TWO_USES if layout.axis == 1 else OTHER_AXIS
        slot, layout = builder.densify(source, node.name, why), None
    else:
        slot = builder.slot(source)
    spans = layout.spans if layout else (ChannelSpan(inputs),)
    kernel = builder.shape(conv.weight)[2:]
    factors: int | None = None
    if is_depthwise:
        output_spans = _record_depthwise(builder, node, conv, spans)
        result = ChannelLayout(1, output_spans) if layout else None
    else:
        outputs = node.meta["value"].shape[1]
        site = builder.site(conv.weight)
        result = make_site_layout(site, outputs, 1) if site is not None else None
        output_spans = result.spans if result else (ChannelSpan(outputs),)
        factors = builder.register_factors(spans, (1, -1, *([1] * len(kernel))))
        builder.record_slicing(conv.weight, output_spans, spans)
        unit_macs = prod(kernel) * prod(node.meta["value"].shape[2:])
        builder.record_cost(node, conv.weight, output_spans, spans, unit_macs)
    builder.record_slicing(conv.bias, output_spans)
    builder.track_gradient(node, conv.weight, conv.bias)
    run = _make_convolution(conv, slot, factors, _find_stride_slices(kernel, conv.options))
    builder.emit(node, run, [slot], result)
    return True


def _record_depthwise(
    builder: ProgramBuilder, node: fx.Node, conv: Convolution, spans: ChannelSpans
) -> ChannelSpans:
    """Record the slicing and cost of a depthwise convolution, and return its output spans."""
    outputs, *spatial = node.meta["value"].shape[1:]
    multiplier = outputs // channels.width(spans)
    output_spans = tuple(replace(span, repeat=span.repeat * multiplier) for span in spans)
    builder.record_slicing(conv.weight, output_spans)
    unit_macs = prod(builder.shape(conv.weight)[2:]) * prod(spatial)
    builder.record_cost(node, conv.weight, output_spans, None, unit_macs)
    return output_spans


def _make_convolution(
    conv: Convolution, slot: int, factors: int | None, stride_slices: tuple[slice, ...] | None
) -> InstructionFn:
    function, weight, bias = conv.function, conv.weight, conv.bias
    options = conv.options if stride_slices is None else (1, 0, 1)
    padding, is_depthwise = conv.explicit_padding, conv.groups > 1

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        x, w = environment[slot], bound.params[weight]
        if factors is not None and (factor := bound.query_results[factors]) is not None:
            x, w = _apply_factor(x, w, factor)
        if padding is not None:
            x = F.pad(x, padding[1], mode=padding[0])
        if stride_slices is not None:
            x = x[stride_slices]
        b = bound.params[bias] if bias is not None else None
        return function(x, w, b, *options, x.shape[1] if is_depthwise else 1)

    return run


def _apply_factor(x: Tensor, w: Tensor, factor: Any) -> tuple[Tensor, Tensor]:
    """Scale the input channels of the values or of the weights, whichever are smaller."""
    return (x * factor, w) if x.numel() < w.numel() else (x, w * factor)


def _find_stride_slices(
    kernel: Sequence[int], options: tuple[Any, ...]
) -> tuple[slice, ...] | None:
    """Return slices that replace the stride of a 1x1 convolution.

    In channels-last format, oneDNN's backward pass of such a convolution writes past its buffers
    unless channels are a multiple of eight (seen with torch 2.13 on AVX2).
    """
    stride, padding, _ = options
    strides = [stride] * len(kernel) if isinstance(stride, int) else list(stride)
    pads = [padding] if isinstance(padding, int | str) else list(padding)
    if any(size != 1 for size in kernel) or any(pad not in {0, "valid"} for pad in pads):
        return None
    if all(step == 1 for step in strides):
        return None
    return (slice(None), slice(None), *(slice(None, None, step) for step in strides))


def lower_linear(
    builder: ProgramBuilder, node: fx.Node, source: fx.Node, weight: str, bias: str | None
) -> bool:
    """Lower a linear layer on the last axis."""
    value, last = node.meta["value"], node.meta["value"].dim() - 1
    layout = builder.layout(source)
    if layout and (layout.axis != last or builder.is_unsliced(weight)):
        why = TWO_USES if layout.axis == last else OTHER_AXIS
        slot, layout = builder.densify(source, node.name, why), None
    else:
        slot = builder.slot(source)
    spans = layout.spans if layout else (ChannelSpan(source.meta["value"].shape[-1]),)
    site = builder.site(weight)
    result = make_site_layout(site, value.shape[-1], last) if site is not None else None
    output_spans = result.spans if result else (ChannelSpan(value.shape[-1]),)
    factors = builder.register_factors(spans, (1, -1))
    builder.record_slicing(weight, output_spans, spans)
    builder.record_slicing(bias, output_spans)
    builder.record_cost(node, weight, output_spans, spans, prod(value.shape[:-1]) // BATCH)
    builder.track_gradient(node, weight, bias)

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        x, w = environment[slot], bound.params[weight]
        if factors is not None and (factor := bound.query_results[factors]) is not None:
            x, w = _apply_factor(x, w, factor)
        return F.linear(x, w, bound.params[bias] if bias is not None else None)

    builder.emit(node, run, [slot], result)
    return True


@dataclass(frozen=True)
class Norm:
    """The common arguments of norm layers."""

    source: fx.Node
    weight: str | None
    bias: str | None
    eps: float


def lower_batch_norm(
    builder: ProgramBuilder,
    node: fx.Node,
    norm: Norm,
    statistic_names: tuple[str | None, str | None, str | None],  # mean, variance, batch count
    momentum: float | None,
) -> bool:
    """Lower batch norm, leaving the statistics of absent channels unchanged."""
    mean, variance, batches = statistic_names
    slot, layout = _prepare_channelwise(builder, node, norm, 1, mean, variance)
    spans = layout.spans if layout else None
    for name in (norm.weight, norm.bias, mean, variance):
        builder.record_slicing(name, spans)
    builder.record_slicing(batches)
    builder.track_gradient(node, norm.weight, norm.bias)
    weight, bias, eps = norm.weight, norm.bias, norm.eps

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        params = bound.params
        factor = momentum
        if batches is not None:
            params[batches].add_(1)
            if factor is None:
                factor = 1.0 / float(params[batches])
        return F.batch_norm(
            environment[slot],
            params[mean] if mean is not None else None,
            params[variance] if variance is not None else None,
            params[weight] if weight is not None else None,
            params[bias] if bias is not None else None,
            True,
            factor or 0.0,
            eps,
        )

    builder.emit(node, run, [slot], layout)
    return True


def lower_instance_norm(builder: ProgramBuilder, node: fx.Node, norm: Norm) -> bool:
    """Lower instance norm, which treats each channel of each sample alone."""
    slot, layout = _prepare_channelwise(builder, node, norm, 1)
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    for name in (weight, bias):
        builder.record_slicing(name, layout.spans if layout else None)
    builder.track_gradient(node, weight, bias)

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        w = bound.params[weight] if weight is not None else None
        b = bound.params[bias] if bias is not None else None
        return F.instance_norm(environment[slot], None, None, w, b, True, 0.0, eps)

    builder.emit(node, run, [slot], layout)
    return True


def lower_group_norm(builder: ProgramBuilder, node: fx.Node, norm: Norm, groups: int) -> bool:
    """Lower group norm, with statistics over the present channels of each group."""
    slot, layout = _prepare_channelwise(builder, node, norm, 1)
    spans = layout.spans if layout else None
    builder.record_slicing(norm.weight, spans)
    builder.record_slicing(norm.bias, spans)
    builder.track_gradient(node, norm.weight, norm.bias)
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    query = (
        builder.register_query(lambda index: _assign_groups(index, layout.spans, groups))
        if layout
        else None
    )

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        w = bound.params[weight] if weight is not None else None
        b = bound.params[bias] if bias is not None else None
        assignment = bound.query_results[query] if query is not None else groups
        if isinstance(assignment, int):
            return F.group_norm(environment[slot], assignment, w, b, eps)
        group_index, group_sizes = assignment
        return unequal_group_norm(environment[slot], group_index, group_sizes, w, b, eps)

    builder.emit(node, run, [slot], layout)
    return True


def _assign_groups(
    channel_index: ChannelIndex, spans: ChannelSpans, groups: int
) -> int | tuple[Tensor, Tensor]:
    """Return the number of groups if they have equal sizes, else group indices and sizes."""
    positions = channel_index.positions(spans)
    group_of_channel = positions // (channels.width(spans) // groups)
    present, group_index, group_sizes = np.unique(
        group_of_channel, return_inverse=True, return_counts=True
    )
    if len(set(group_sizes.tolist())) == 1:
        return len(present)
    return channel_index.to_index_tensor(group_index), channel_index.to_float_tensor(
        group_sizes.astype(np.float64), (1, -1)
    )


def unequal_group_norm(
    x: Tensor,
    group_index: Tensor,
    group_sizes: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalise groups of unequal size; `group_index` maps channels to groups."""
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    total = group_sizes * flat.shape[2]
    empty = flat.new_zeros(flat.shape[0], group_sizes.shape[1])
    mean = empty.index_add(1, group_index, flat.sum(2)) / total
    centred = flat - mean[:, group_index].unsqueeze(2)
    variance = empty.index_add(1, group_index, centred.square().sum(2)) / total
    out = (centred * (variance + eps).rsqrt()[:, group_index].unsqueeze(2)).view_as(x)
    shape = broadcast_shape(1, x.dim())
    out = out * weight.view(shape) if weight is not None else out
    return out + bias.view(shape) if bias is not None else out


def lower_layer_norm(
    builder: ProgramBuilder, node: fx.Node, norm: Norm, normalized_shape: Sequence[int]
) -> bool:
    """Lower layer norm, with statistics over the present channels if it mixes channels."""
    dims = node.meta["value"].dim()
    first_dim = dims - len(normalized_shape)
    layout = builder.layout(norm.source)
    mixes_channels = layout is not None and layout.axis >= first_dim
    slot, layout = _prepare_channelwise(builder, node, norm, layout.axis if layout else 1)
    slicing = [
        layout.spans if layout and mixes_channels and first_dim + dim == layout.axis else None
        for dim in range(len(normalized_shape))
    ]
    builder.record_slicing(norm.weight, *slicing)
    builder.record_slicing(norm.bias, *slicing)
    builder.track_gradient(node, norm.weight, norm.bias)
    weight, bias, eps = norm.weight, norm.bias, norm.eps

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        x = environment[slot]
        w = bound.params[weight] if weight is not None else None
        b = bound.params[bias] if bias is not None else None
        return F.layer_norm(x, x.shape[first_dim:], w, b, eps)

    builder.emit(node, run, [slot], layout)
    return True


def lower_local_response_norm(
    builder: ProgramBuilder,
    node: fx.Node,
    source: fx.Node,
    size: int,
    options: tuple[float, float, float],
) -> bool:
    """Lower local response norm, with neighbours as in the full network."""
    layout, (alpha, beta, k) = builder.layout(source), options
    if layout is None or layout.axis != 1:
        return False
    slot = builder.slot(source)
    query = builder.register_query(lambda index: _find_neighbours(index, layout.spans, size))
    builder.track_gradient(node)

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        x = environment[slot]
        if bound.query_results[query] is None:
            return fast_lrn.local_response_norm(x, size, alpha, beta, k)
        square = x.square()
        padded = F.pad(square, [0, 0] * (x.dim() - 2) + [0, 1])  # zeros for absent neighbours
        total = square
        for neighbours in bound.query_results[query]:
            total = total + padded.index_select(1, neighbours)
        out: Tensor = x / (total * (alpha / size) + k).pow(beta)
        return out

    builder.emit(node, run, [slot], layout)
    return True


def _find_neighbours(
    channel_index: ChannelIndex, spans: ChannelSpans, size: int
) -> list[Tensor] | None:
    positions = channel_index.positions(spans)
    if len(positions) == channels.width(spans):
        return None
    index_of_position = np.full(channels.width(spans) + 2 * size, len(positions))
    index_of_position[positions + size] = np.arange(len(positions))
    offsets = [o for o in range(-(size // 2), (size - 1) // 2 + 1) if o]
    return [
        channel_index.to_index_tensor(index_of_position[positions + size + offset])
        for offset in offsets
    ]


def lower_prelu(builder: ProgramBuilder, node: fx.Node, source: fx.Node, weight: str) -> bool:
    """Lower PReLU with one slope for all channels or one per channel."""
    norm = Norm(source, weight, None, 0.0)
    slot, layout = _prepare_channelwise(builder, node, norm, 1)
    builder.record_slicing(
        weight, layout.spans if layout and builder.shape(weight)[0] > 1 else None
    )
    builder.track_gradient(node, weight)
    builder.emit(
        node,
        lambda environment, bound: F.prelu(environment[slot], bound.params[weight]),
        [slot],
        layout,
    )
    return True


def _prepare_channelwise(
    builder: ProgramBuilder, node: fx.Node, norm: Norm, axis: int, *other_names: str | None
) -> tuple[int, ChannelLayout | None]:
    """Return the slot and layout that a layer with one parameter per channel reads."""
    layout = builder.layout(norm.source)
    if layout and (
        layout.axis != axis or builder.is_unsliced(norm.weight, norm.bias, *other_names)
    ):
        return builder.densify(norm.source, node.name, "its parameters read all channels"), None
    return builder.slot(norm.source), layout
