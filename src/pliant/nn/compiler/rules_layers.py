"""Rules for convolutions and linear layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant import runtime
from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder, RunFn
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans
from pliant.nn.compiler.layer_weights import PreparedWeight, WeightRead
from pliant.nn.compiler.program import BoundProgram, Env, LayerCost, Shape
from pliant.nn.compiler.shared_masks import couple_copies, find_copy
from pliant.nn.compiler.trace import BATCH

ReadWeight = Callable[[Env, BoundProgram], PreparedWeight]
runtime.retain_compiled_kernels()  # on import, as it comes too late after a convolution
CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
TRANSPOSED = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer, from a module or from a functional call."""

    source: fx.Node
    function: Callable[..., Tensor]
    weight: str
    bias: str | None
    options: tuple[Any, ...] = ()  # stride, padding, dilation of a convolution
    groups: int = 1
    explicit_padding: tuple[str, Sequence[int]] | None = None  # mode and widths, unless zeros
    output_padding: Any = 0  # of a transposed convolution
    computed: fx.Node | None = None  # the weight, if the network computes it from `weight`

    @property
    def is_transposed(self) -> bool:
        return self.function in TRANSPOSED.values()

    @property
    def output_dim(self) -> int:
        """Return the dimension of the weight along the outputs."""
        return int(self.is_transposed)


def may_drop(builder: Builder, layer: Layer) -> bool:
    """Return whether filters of a layer may be dropped, the same ones in each of its groups."""
    is_depthwise = not layer.is_transposed and builder.shape(layer.weight)[1] == 1
    return layer.groups == 1 or (not layer.is_transposed and not is_depthwise)


def lower_layer(builder: Builder, node: fx.Node, layer: Layer) -> bool:
    """Lower a layer; False for groups that cannot have equal masks."""
    source, value, is_linear = layer.source, node.meta["value"], layer.function is F.linear
    axis = value.dim() - 1 if is_linear else 1
    inputs, outputs = source.meta["value"].shape[axis], value.shape[axis]
    is_depthwise = layer.groups == inputs and layer.groups > 1
    if layer.groups != 1 and layer.is_transposed:
        return False
    layout = builder.layout(source)
    if layout and layout.axis != axis:
        slot, layout = builder.densify(source, node.name, "its channels are on another axis"), None
    elif layout and is_depthwise and builder.is_unsliced(layer.weight, layer.bias):
        slot, layout = builder.densify(source, node.name, "a parameter is used in two ways"), None
    else:
        slot = builder.slot(source)
    spans = layout.spans if layout else (ChannelSpan(inputs),)
    if layer.groups > 1 and not is_depthwise:  # every group reads its part of the channels
        part = find_copy(spans, layer.groups)
        if part is None and not couple_copies(builder, spans, layer.groups):
            slot = builder.densify(source, node.name, "its groups have different channels")
        spans = part or (ChannelSpan(inputs // layer.groups),)
    full_shape = builder.shape(layer.weight)
    kernel = full_shape[2:]
    # all positions, as one sample may have several rows (frames, crops) in the batch dimension
    positions = source.meta["value"].numel() // inputs if layer.is_transposed else None
    unit_macs = prod(kernel) * ((positions or value.numel() // outputs) // BATCH)
    if is_depthwise:
        multiplier = outputs // channels.width(spans)
        output_spans = tuple(replace(span, repeat=span.repeat * multiplier) for span in spans)
        result = ChannelLayout(1, output_spans) if layout else None
        input_spans = None
    else:
        site_spans = builder.find_output_spans(layer.weight, outputs)
        output_spans = site_spans or (ChannelSpan(outputs),)
        result, input_spans = ChannelLayout(axis, site_spans) if site_spans else None, spans
    builder.record_cost(node, LayerCost(layer.weight, unit_macs, output_spans, input_spans))
    # only the weight has a factor for each channel that a group reads
    is_plain = is_depthwise or (layer.groups == 1 and not layer.is_transposed)
    input_positions = source.meta["value"].numel() / BATCH / inputs if is_plain else inf
    reads, read = _read_weight(builder, layer, output_spans, input_spans, input_positions)
    builder.record_slicing(layer.bias, output_spans)
    run = _make_layer(layer, slot, read, full_shape, is_depthwise)
    return builder.emit(node, run, [slot, *reads], result, layer.weight, layer.bias)


def _read_weight(
    builder: Builder,
    layer: Layer,
    outputs: ChannelSpans,
    inputs: ChannelSpans | None,
    positions: float,
) -> tuple[list[int], ReadWeight]:
    """Record how a weight is sliced; return the slots that it is read from, and how."""
    factors, dim = None, layer.output_dim
    if inputs is not None:
        shape = [1] * len(builder.shape(layer.weight))
        shape[1 - dim] = -1
        factors = builder.add_factors(inputs, tuple(shape))
    if layer.computed is not None or builder.is_unsliced(layer.weight):
        return _select_weight(builder, layer, outputs, inputs, factors)
    builder.record_slicing(layer.weight, *((outputs, inputs) if dim == 0 else (inputs, outputs)))
    builder.program.weight_reads.append(WeightRead(layer.weight, factors, positions))
    index = len(builder.program.weight_reads) - 1
    return [], lambda _, bound: bound.weights[index]


def _select_weight(
    builder: Builder,
    layer: Layer,
    outputs: ChannelSpans,
    inputs: ChannelSpans | None,
    factors: int | None,
) -> tuple[list[int], ReadWeight]:
    """Select the channels that a layer reads from a weight that has all of them.

    The network computes it, or uses it for several values with different channels.
    """
    weight, dim, selected = layer.computed, layer.output_dim, {1 - layer.output_dim: inputs}
    if weight is None:
        builder.record_slicing(layer.weight, *[None] * dim, outputs)
        slot = builder.load_param(layer.weight)
    else:
        layout = builder.layout(weight)
        if layout is None:
            selected[dim] = outputs
        if layout is None or layout.axis == dim:
            slot = builder.slot(weight)
        else:  # lowering restarts
            slot = builder.densify(weight, weight.name, "its outputs are on another axis")
    sliced = {
        axis: spans for axis, spans in selected.items() if spans and not channels.is_dense(spans)
    }
    query = builder.add_query(
        lambda index: [
            (axis, index.to_index_tensor(index.positions(spans))) for axis, spans in sliced.items()
        ]
    )

    def read(env: Env, bound: BoundProgram) -> PreparedWeight:
        selection: Tensor = env[slot]
        for axis, kept in bound.results[query]:
            selection = selection.index_select(axis, kept)
        return bound.scale(selection, factors), None

    return [slot], read


def _make_layer(
    layer: Layer, slot: int, read: ReadWeight, full_shape: Shape, is_depthwise: bool
) -> RunFn:
    function, bias, groups = layer.function, layer.bias, layer.groups
    options, padding = layer.options, layer.explicit_padding
    if layer.is_transposed:
        return _make_transposed(layer, slot, read)
    strides = _find_pointwise_strides(full_shape[2:], options) if options else None
    skip = _make_skip(strides) if strides else None
    if skip is not None:
        options = (1, 0, 1)
    is_pointwise = strides is not None and skip is None
    may_multiply = is_pointwise and function is F.conv2d and groups == 1

    def run(env: Env, bound: BoundProgram) -> Tensor:
        x, (w, factor), b = env[slot], read(env, bound), bound.param(bias)
        if factor is not None:
            x = x * factor
        if not options:
            return function(x, w, b)
        if padding is not None:
            x = F.pad(x, padding[1], mode=padding[0])
        if skip is not None:
            x = skip(x)
        if may_multiply and _is_channels_last(x) and not _is_common_shape(w, full_shape):
            return F.linear(x.permute(0, 2, 3, 1), w.flatten(1), b).permute(0, 3, 1, 2)
        return function(x, w, b, *options, x.shape[1] if is_depthwise else groups)

    return run


def _make_transposed(layer: Layer, slot: int, read: ReadWeight) -> RunFn:
    function, bias, (stride, padding, dilation) = layer.function, layer.bias, layer.options

    def run(env: Env, bound: BoundProgram) -> Tensor:
        (w, _), b = read(env, bound), bound.param(bias)
        return function(env[slot], w, b, stride, padding, layer.output_padding, 1, dilation)

    return run


def _is_channels_last(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last)


def _is_common_shape(weight: Tensor, full_shape: Shape) -> bool:
    """Guess whether many subnets have this shape, as full networks and those in blocks do.

    For each new shape oneDNN compiles a convolution, which takes longer than running it. A matrix
    product of channels-last pixels needs none, but is slower than a compiled convolution.
    """
    outputs, inputs = weight.shape[:2]
    return weight.shape == full_shape or (outputs % 4 == 0 and inputs % 2 == 0)


def _find_pointwise_strides(
    kernel: Sequence[int], options: tuple[Any, ...]
) -> tuple[int, ...] | None:
    """Return the strides of a 1x1 convolution without padding; None for any other."""
    stride, padding, _ = options
    strides = [stride] * len(kernel) if isinstance(stride, int) else list(stride)
    pads = [padding] if isinstance(padding, int | str) else list(padding)
    if any(size != 1 for size in kernel) or any(pad not in {0, "valid"} for pad in pads):
        return None
    return tuple(strides)


def _make_skip(strides: tuple[int, ...]) -> Callable[[Tensor], Tensor] | None:
    """Return the function that replaces the strides of a 1x1 convolution; None if all are 1.

    In channels-last format, oneDNN's backward pass of such a convolution writes past its buffers
    unless channels are a multiple of eight (seen with torch 2.13 on AVX2).
    """
    if all(step == 1 for step in strides):
        return None
    if len(strides) == 2:  # the gradient of a slice would not be channels last
        return lambda x: F.avg_pool2d(x, 1, strides)
    slices = (slice(None), slice(None), *(slice(None, None, step) for step in strides))
    return lambda x: x[slices]
