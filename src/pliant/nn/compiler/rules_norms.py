"""Rules for norm layers and PReLU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant.nn.compiler import channels, fast_lrn
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpans
from pliant.nn.compiler.folded_norm import count_row_pixels, normalise_folded
from pliant.nn.compiler.norm_relu import batch_norm_relu, find_fusable_relu
from pliant.nn.compiler.program import BoundProgram, ChannelIndex, Env, broadcast_shape

# of the value, its weight and its bias
NormFn = Callable[[BoundProgram, Tensor, Tensor | None, Tensor | None], Tensor]


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
        if is_training and (count := count_row_pixels(x)):
            options: Any = {"momentum": factor or 0.0, "eps": eps, "count": count}
            return normalise_folded(x, m, v, w, b, **options, has_relu=False)
        return F.batch_norm(x, m, v, w, b, is_training, factor or 0.0, eps)

    return emit(compute, relu)


def lower_instance_norm(builder: Builder, node: fx.Node, norm: Norm) -> bool:
    """Lower instance norm, which treats each channel of each sample alone.

    If it tracks statistics, those of absent channels stay unchanged.
    """
    _, emit = _prepare_norm(builder, node, norm)
    mean, variance = norm.params["running_mean"], norm.params["running_var"]
    arguments = norm.arguments
    is_own = arguments.get("use_input_stats", arguments.get("training")) or mean is None
    momentum, eps = arguments["momentum"] or 0.0, arguments["eps"]

    def compute(bound: BoundProgram, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        m, v = bound.param(mean), bound.param(variance)
        return F.instance_norm(x, m, v, w, b, is_own, momentum, eps)

    return emit(compute)


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
    nn.SyncBatchNorm: lower_batch_norm,  # devices do not synchronise their steps
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), lower_instance_norm),
    F.instance_norm: lower_instance_norm,
    **dict.fromkeys((nn.GroupNorm, F.group_norm, torch.group_norm), lower_group_norm),
    **dict.fromkeys((nn.LayerNorm, F.layer_norm, torch.layer_norm), lower_layer_norm),
    **dict.fromkeys((nn.LocalResponseNorm, F.local_response_norm), lower_local_response_norm),
    **dict.fromkeys((nn.PReLU, F.prelu, "prelu"), lower_prelu),
    F.batch_norm: lower_batch_norm,
}
