"""Rules for layers with parameters: convolutions, linear layers and norms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant import runtime
from pliant.nn.compiler import channels, fast_lrn
from pliant.nn.compiler.builder import Builder, RunFn, broadcast_shape
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans
from pliant.nn.compiler.layer_weights import WeightRead
from pliant.nn.compiler.norm_relu import batch_norm_relu, find_fusable_relu
from pliant.nn.compiler.program import BoundProgram, ChannelIndex, Env, LayerCost, Shape
from pliant.nn.compiler.shared_masks import couple_copies, find_copy
from pliant.nn.compiler.trace import BATCH

# of the value, its weight and its bias
NormFn = Callable[[BoundProgram, Tensor, Tensor | None, Tensor | None], Tensor]
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
    elif layout and builder.is_unsliced(layer.weight):
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
    factors: int | None = None
    if is_depthwise:
        multiplier = outputs // channels.width(spans)
        output_spans = tuple(replace(span, repeat=span.repeat * multiplier) for span in spans)
        result = ChannelLayout(1, output_spans) if layout else None
        builder.record_slicing(layer.weight, output_spans)
        builder.record_cost(node, LayerCost(layer.weight, unit_macs, output_spans, None))
    else:
        site_spans = builder.find_output_spans(layer.weight, outputs)
        output_spans = site_spans or (ChannelSpan(outputs),)
        result = ChannelLayout(axis, site_spans) if site_spans else None
        shape = (-1, 1) if layer.is_transposed else (1, -1)
        factors = builder.add_factors(spans, (*shape, *([1] * len(kernel))))
        dims = (spans, output_spans) if layer.is_transposed else (output_spans, spans)
        builder.record_slicing(layer.weight, *dims)
        builder.record_cost(node, LayerCost(layer.weight, unit_macs, output_spans, spans))
    builder.record_slicing(layer.bias, output_spans)
    input_positions = source.meta["value"].numel() / BATCH / inputs
    # only the weight has a factor for each channel that a group reads
    is_plain = is_depthwise or (layer.groups == 1 and not layer.is_transposed)
    builder.program.weight_reads.append(
        WeightRead(layer.weight, factors, input_positions if is_plain else inf)
    )
    read = len(builder.program.weight_reads) - 1
    run = _make_layer(layer, slot, read, full_shape, is_depthwise)
    return builder.emit(node, run, [slot], result, layer.weight, layer.bias)


def _make_layer(layer: Layer, slot: int, read: int, full_shape: Shape, is_depthwise: bool) -> RunFn:
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
        x, (w, factor), b = env[slot], bound.weights[read], bound.param(bias)
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


def _make_transposed(layer: Layer, slot: int, read: int) -> RunFn:
    function, bias, (stride, padding, dilation) = layer.function, layer.bias, layer.options

    def run(env: Env, bound: BoundProgram) -> Tensor:
        (w, _), b = bound.weights[read], bound.param(bias)
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


@dataclass(frozen=True)
class Norm:
    """A norm layer or PReLU, from a module or from a functional call."""

    source: fx.Node
    params: Mapping[str, str | None]  # by argument
    arguments: Mapping[str, Any]


def _prepare_norm(
    builder: Builder, node: fx.Node, norm: Norm, *, axis: int = 1, param_axis: int | None = 0
) -> tuple[ChannelLayout | None, Callable[..., bool]]:
    """Record how a norm's parameters are sliced; return the layout it reads, and how to emit it.

    Without a `param_axis`, the parameters do not depend on the channel. A norm may be emitted as a
    part of the ReLU that reads it.
    """
    layout = builder.layout(norm.source)
    names = [norm.params[key] for key in ("weight", "bias", "running_mean", "running_var")]
    if layout and (layout.axis != axis or builder.is_unsliced(*names)):
        reason = "its parameters read all channels"
        slot, layout = builder.densify(norm.source, node.name, reason), None
    else:
        slot = builder.slot(norm.source)
    for name in names:
        if layout and param_axis is not None:
            builder.record_slicing(name, *[None] * param_axis, layout.spans)
        else:
            builder.record_slicing(name)
    weight, bias = names[:2]

    def emit(compute: NormFn, relu: fx.Node | None = None) -> bool:
        def run(env: Env, bound: BoundProgram) -> Tensor:
            return compute(bound, env[slot], bound.param(weight), bound.param(bias))

        if relu is not None:
            builder.fused_runs[relu] = run
        return builder.emit(node, None if relu else run, [slot], layout, weight, bias)

    return layout, emit


def lower_batch_norm(builder: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lower batch norm, leaving the statistics of absent channels unchanged.

    In evaluation mode it uses the running statistics, if it has them, and leaves all unchanged.
    """
    _, emit = _prepare_norm(builder, node, norm)
    mean, variance = norm.params["running_mean"], norm.params["running_var"]
    is_training = norm.arguments["training"] or mean is None
    batches, momentum = norm.params["num_batches_tracked"], norm.arguments["momentum"]
    eps = norm.arguments["eps"]
    builder.record_slicing(batches)
    relu = find_fusable_relu(node, builder.modules) if is_training else None

    def compute(bound: BoundProgram, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        factor, m, v = momentum, bound.param(mean), bound.param(variance)
        if batches is not None and is_training:
            bound.params[batches].add_(1)
            if factor is None:
                factor = 1.0 / float(bound.params[batches])
        if relu is not None:
            return batch_norm_relu(x, m, v, w, b, momentum=factor or 0.0, eps=eps)
        return F.batch_norm(x, m, v, w, b, is_training, factor or 0.0, eps)

    return emit(compute, relu)


def lower_instance_norm(builder: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lower instance norm, which treats each channel of each sample alone."""
    if norm.arguments["track_running_stats"]:
        return False
    eps, (_, emit) = norm.arguments["eps"], _prepare_norm(builder, node, norm)
    return emit(lambda _, x, w, b: F.instance_norm(x, None, None, w, b, True, 0.0, eps))


def lower_group_norm(builder: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lower group norm, with statistics over the present channels of each group."""
    layout, emit = _prepare_norm(builder, node, norm)
    groups, eps = norm.arguments["num_groups"], norm.arguments["eps"]
    query = builder.add_query(
        lambda index: _assign_groups(index, layout.spans, groups) if layout else groups
    )

    def compute(bound: BoundProgram, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        assignment = bound.results[query]
        if isinstance(assignment, int):
            return F.group_norm(x, assignment, w, b, eps)
        group_index, sizes = assignment
        return unequal_group_norm(x, group_index, sizes, w, b, eps)

    return emit(compute)


def _assign_groups(
    index: ChannelIndex, spans: ChannelSpans, groups: int
) -> int | tuple[Tensor, Tensor]:
    """Return the number of groups if they have equal sizes, else group indices and sizes."""
    group_of_channel = index.positions(spans) // (channels.width(spans) // groups)
    _, group_index, sizes = np.unique(group_of_channel, return_inverse=True, return_counts=True)
    if len(set(sizes.tolist())) == 1:
        return len(sizes)
    sizes_tensor = index.to_float_tensor(sizes.astype(np.float64), (1, -1))
    return index.to_index_tensor(group_index), sizes_tensor


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


def lower_layer_norm(builder: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lower layer norm, with statistics over the present channels if it mixes channels."""
    first_dim = node.meta["value"].dim() - len(norm.arguments["normalized_shape"])
    layout, eps = builder.layout(norm.source), norm.arguments["eps"]
    axis = layout.axis if layout else 1
    param_axis = axis - first_dim if axis >= first_dim else None
    _, emit = _prepare_norm(builder, node, norm, axis=axis, param_axis=param_axis)
    return emit(lambda _, x, w, b: F.layer_norm(x, x.shape[first_dim:], w, b, eps))


def lower_local_response_norm(builder: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lower local response norm, with neighbours as in the full network."""
    layout = builder.layout(norm.source)
    if layout is None or layout.axis != 1:
        return False
    size, alpha, beta, k = (norm.arguments[key] for key in ("size", "alpha", "beta", "k"))
    slot = builder.slot(norm.source)
    query = builder.add_query(lambda index: _find_neighbours(index, layout.spans, size))

    def run(env: Env, bound: BoundProgram) -> Tensor:
        x = env[slot]
        if bound.results[query] is None:
            return fast_lrn.local_response_norm(x, size, alpha, beta, k)
        square = x.square()
        padded = F.pad(square, [0, 0] * (x.dim() - 2) + [0, 1])  # zeros for absent neighbours
        total = square
        for neighbours in bound.results[query]:
            total = total + padded.index_select(1, neighbours)
        out: Tensor = x / (total * (alpha / size) + k).pow(beta)
        return out

    return builder.emit(node, run, [slot], layout)


def _find_neighbours(index: ChannelIndex, spans: ChannelSpans, size: int) -> list[Tensor] | None:
    positions = index.positions(spans)
    if len(positions) == channels.width(spans):
        return None
    index_of_position = np.full(channels.width(spans) + 2 * size, len(positions))
    index_of_position[positions + size] = np.arange(len(positions))
    offsets = [o for o in range(-(size // 2), (size - 1) // 2 + 1) if o]
    return [
        index.to_index_tensor(index_of_position[positions + size + offset]) for offset in offsets
    ]


def lower_prelu(builder: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lower PReLU with one slope for all channels or one per channel."""
    weight = norm.params["weight"]
    if weight is None:
        return False
    param_axis = 0 if builder.shape(weight)[0] > 1 else None
    _, emit = _prepare_norm(builder, node, norm, param_axis=param_axis)
    return emit(lambda bound, x, w, b: F.prelu(x, bound.params[weight]))


# by module, function or name of a method
NORM_RULES: dict[Any, Callable[[Builder, fx.Node, Norm], bool]] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), lower_batch_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), lower_instance_norm),
    **dict.fromkeys((nn.GroupNorm, F.group_norm, torch.group_norm), lower_group_norm),
    **dict.fromkeys((nn.LayerNorm, F.layer_norm, torch.layer_norm), lower_layer_norm),
    **dict.fromkeys((nn.LocalResponseNorm, F.local_response_norm), lower_local_response_norm),
    **dict.fromkeys((nn.PReLU, F.prelu, "prelu"), lower_prelu),
    F.batch_norm: lower_batch_norm,
}
