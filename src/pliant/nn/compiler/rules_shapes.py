"""Rules for operations that move, join or split channels."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from torch import Tensor, fx

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans
from pliant.nn.compiler.program import BoundProgram, ChannelIndex, Env, broadcast_shape
from pliant.nn.compiler.reordering import reorder
from pliant.nn.compiler.shared_masks import (
    couple_copies,
    find_copy,
    leads_to_attention,
    merge_filters,
)
from pliant.nn.compiler.trace import BATCH


def lower_channelwise(
    builder: Builder, node: fx.Node, source: fx.Node, axis: int | None = None
) -> bool:
    """Lower an operation that treats each channel alone, by replaying it."""
    layout = builder.layout(source)
    if layout is not None and isinstance(node.meta["value"], tuple | list):
        return False  # each of several results would need a layout
    if not isinstance(node.meta.get("value"), Tensor):
        layout = None
    if layout is not None and axis is not None:
        layout = ChannelLayout(axis, layout.spans)
    slots = {other: builder.slot(other) for other in node.all_input_nodes}
    return builder.replay(node, layout, slots)


def slice_dense(builder: Builder, node: fx.Node, axis: int, spans: ChannelSpans) -> int:
    """Return the slot of these channels of a value or parameter that has all of them."""
    name, vector = builder.param_name(node), builder.param_view(node)
    if not builder.is_unsliced(name, vector) and name is not None:
        builder.record_slicing(name, *[None] * axis, spans)
        return builder.load_param(name)
    if vector is None or builder.is_unsliced(vector):
        return select_kept(builder, node, axis, spans)
    builder.record_slicing(vector, spans)
    shape = broadcast_shape(axis, node.meta["value"].dim())
    return builder.add_instruction(node.name, lambda _, bound: bound.params[vector].view(shape), ())


def select_kept(
    builder: Builder, node: fx.Node, axis: int, kept: ChannelSpans, present: ChannelSpans = ()
) -> int:
    """Add the instruction that selects channels of a value that has all, or these, present."""
    slot = builder.slot(node)
    query = builder.add_query(lambda index: index.to_index_tensor(index.find(kept, present)))
    return builder.add_instruction(
        f"{node.name}_kept",
        lambda env, bound: env[slot].index_select(axis, bound.results[query]),
        (slot,),
    )


def lower_concatenate(builder: Builder, node: fx.Node, parts: list[fx.Node], dim: int) -> bool:
    """Lower a concatenation of channels, or of equal layouts along another axis."""
    dim %= node.meta["value"].dim()
    layouts = [builder.layout(part) for part in parts]
    if all(layout is None for layout in layouts):
        return lower_channelwise(builder, node, parts[0])
    if all(layout == layouts[0] for layout in layouts) and layouts[0] and layouts[0].axis != dim:
        return lower_channelwise(builder, node, parts[0])
    if any(layout is not None and layout.axis != dim for layout in layouts):
        return _join_constants(builder, node, parts)
    spans = tuple(
        span
        for part, layout in zip(parts, layouts, strict=True)
        for span in (layout.spans if layout else (ChannelSpan(part.meta["value"].shape[dim]),))
    )
    return builder.replay(
        node, ChannelLayout(dim, spans), {part: builder.slot(part) for part in parts}
    )


def _join_constants(builder: Builder, node: fx.Node, parts: list[fx.Node]) -> bool:
    """Lower a concatenation of equal layouts with parameters, such as a class token."""
    layouts = {part: builder.layout(part) for part in parts}
    known = [layout for layout in layouts.values() if layout]
    if any(layout is None and not builder.is_constant(part) for part, layout in layouts.items()):
        return False
    if any(layout != known[0] for layout in known):
        return False
    axis, spans = known[0].axis, known[0].spans
    slots = {
        part: builder.slot(part) if layout else slice_dense(builder, part, axis, spans)
        for part, layout in layouts.items()
    }
    names = [builder.param_name(part) for part in parts]
    return builder.replay(node, known[0], slots, *names)


def lower_reshape(builder: Builder, node: fx.Node, source: fx.Node) -> bool:
    """Lower a reshape that keeps the channel axis, splits it, or joins it with others."""
    layout = builder.layout(source)
    if layout is None:
        return lower_channelwise(builder, node, source)
    before, after = source.meta["value"].shape, node.meta["value"].shape
    (low, high), (start, stop) = match_axes(before, after, layout.axis)
    if high - low == 1:
        result = _split_axis(builder, node, layout.spans, after[start:stop])
    elif stop - start == 1:
        outer, inner = before[low : layout.axis], before[layout.axis + 1 : high]
        result = None if prod(outer) % BATCH == 0 else (0, _join_axes(layout.spans, outer, inner))
    else:
        result = None
    if result is None:
        return False
    axis, spans = start + result[0], result[1]
    num_kept = next((d for d in range(start) if before[d : d + 1] != after[d : d + 1]), start)
    tail = [-1 if size % BATCH == 0 else size for size in after[num_kept:]]
    slot, query = builder.slot(source), builder.add_query(lambda index: index.count(spans))

    def run(env: Env, bound: BoundProgram) -> Tensor:
        x: Tensor = env[slot]
        sizes = [*x.shape[:num_kept], *tail]
        sizes[axis] = bound.results[query]
        return x.reshape(sizes)

    return builder.emit(node, run, [slot], ChannelLayout(axis, spans))


def match_axes(
    before: Sequence[int], after: Sequence[int], axis: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the smallest ranges of axes, one with this axis, whose sizes have equal products."""
    low = high = start = stop = 0
    while high <= axis:
        low, start = high, stop
        high += 1
        if stop < len(after):
            stop += 1
        while prod(before[low:high]) != prod(after[start:stop]):
            if prod(before[low:high]) < prod(after[start:stop]):
                high += 1
            else:
                stop += 1
    return (low, high), (start, stop)


def _join_axes(spans: ChannelSpans, outer: Sequence[int], inner: Sequence[int]) -> ChannelSpans:
    repeat = prod(inner)
    return tuple(replace(span, repeat=span.repeat * repeat) for span in spans) * prod(outer)


def _split_axis(
    builder: Builder, node: fx.Node, spans: ChannelSpans, sizes: Sequence[int]
) -> tuple[int, ChannelSpans] | None:
    """Return which of the new axes has the channels, and those channels; None for neither."""
    for position in range(len(sizes)):
        part = _find_part(spans, sizes, position)
        if part is not None:
            return position, part
    position = len(sizes) - 2 if leads_to_attention(node) else len(sizes) - 1
    copies, inner = prod(sizes[:position]), prod(sizes[position + 1 :])
    if not merge_filters(builder, spans, inner) and not couple_copies(builder, spans, copies):
        return None
    return position, (ChannelSpan(sizes[position]),)  # lowering restarts


def _find_part(spans: ChannelSpans, sizes: Sequence[int], position: int) -> ChannelSpans | None:
    """Return the channels along one of the axes that theirs is split into, if the others agree."""
    part = find_copy(spans, prod(sizes[:position]))
    inner = prod(sizes[position + 1 :])
    if part is None or any(span.repeat % inner for span in part):
        return None
    return tuple(replace(span, repeat=span.repeat // inner) for span in part)


def lower_shuffle(builder: Builder, node: fx.Node, source: fx.Node, axis: int, groups: int) -> bool:
    """Lower a channel shuffle: every channel keeps its own mask."""
    layout = builder.layout(source)
    if layout is None or layout.axis != axis:
        return lower_channelwise(builder, node, source)
    spans, size = layout.spans, channels.width(layout.spans)
    order = np.arange(size).reshape(groups, -1).T.ravel()
    shuffled = channels.permute(spans, order.tolist())
    slot = builder.slot(source)

    def find_order(index: ChannelIndex) -> tuple[Tensor, Tensor]:
        present = np.searchsorted(index.positions(spans), order[index.positions(shuffled)])
        return index.to_index_tensor(present), index.to_index_tensor(np.argsort(present))

    query = builder.add_query(find_order)
    return builder.emit(
        node,
        lambda env, bound: reorder(env[slot], axis, *bound.results[query]),
        [slot],
        ChannelLayout(axis, shuffled),
    )


def lower_expand(builder: Builder, node: fx.Node, source: fx.Node) -> bool:
    """Lower an expansion along axes other than the channels."""
    layout, shape = builder.layout(source), node.meta["value"].shape
    if layout is None:
        is_dense = all(builder.layout(other) is None for other in node.all_input_nodes)
        return is_dense and lower_channelwise(builder, node, source)
    axis = layout.axis + len(shape) - source.meta["value"].dim()
    if shape[axis] != channels.width(layout.spans) or axis != layout.axis:
        return False
    slot = builder.slot(source)
    sizes = [-1 if dim == axis or size % BATCH == 0 else size for dim, size in enumerate(shape)]
    return builder.emit(node, lambda env, _: env[slot].expand(sizes), [slot], layout)


def lower_reduce(
    builder: Builder, node: fx.Node, source: fx.Node, dims: Any, keepdim: bool
) -> bool:
    """Lower a reduction of axes other than the channels."""
    layout = builder.layout(source)
    if layout is None:
        return lower_channelwise(builder, node, source)
    if dims is None or dims in ((), []):  # all axes
        return False
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {dim % source.meta["value"].dim() for dim in dims}
    if layout.axis in reduced or 0 in reduced:
        return False
    num_removed = 0 if keepdim else sum(dim < layout.axis for dim in reduced)
    return lower_channelwise(builder, node, source, layout.axis - num_removed)


def lower_split(
    builder: Builder, node: fx.Node, source: fx.Node, dim: int, bounds: list[tuple[int, int]]
) -> bool:
    """Lower a split of channels into ranges; with a single range, a slice."""
    layout = builder.layout(source)
    is_tensor = isinstance(node.meta["value"], Tensor)
    if layout is None or dim % source.meta["value"].dim() != layout.axis:
        if layout is None or is_tensor:
            return lower_channelwise(builder, node, source)
        layouts = [layout] * len(node.meta["value"])
        return builder.replay(node, layouts, {source: builder.slot(source)})
    axis, spans = layout.axis, layout.spans
    parts = [channels.slice_spans(spans, start, stop) for start, stop in bounds]
    if any(part is None for part in parts):
        return False
    slot = builder.slot(source)

    def find_ranges(index: ChannelIndex) -> list[tuple[int, int]]:
        ranges = np.searchsorted(index.positions(spans), bounds).tolist()
        return [(start, stop - start) for start, stop in ranges]

    query = builder.add_query(find_ranges)
    layouts = [ChannelLayout(axis, part) for part in parts if part is not None]

    def run(env: Env, bound: BoundProgram) -> Any:
        x: Tensor = env[slot]
        results = tuple(x.narrow(axis, *part) for part in bound.results[query])
        return results[0] if is_tensor else results

    return builder.emit(node, run, [slot], layouts[0] if is_tensor else layouts)


def lower_getitem(builder: Builder, node: fx.Node, source: fx.Node, index: Any) -> bool:
    """Lower the selection of a tuple's part, or a slice of a tensor."""
    parts = builder.layouts(source)
    if parts is not None:
        return builder.replay(node, parts[index], {source: builder.slot(source)})
    value, layout = source.meta["value"], builder.layout(source)
    if layout is None or not isinstance(value, Tensor):
        return lower_channelwise(builder, node, source)
    steps = index if isinstance(index, tuple) else (index,)
    if Ellipsis in steps:
        position = steps.index(Ellipsis)
        missing = value.dim() - sum(step is not None for step in steps) + 1
        steps = (*steps[:position], *[slice(None)] * missing, *steps[position + 1 :])
    if not all(step is None or isinstance(step, int | slice) for step in steps):
        return False
    steps = (*steps, *[slice(None)] * (value.dim() - sum(step is not None for step in steps)))
    dims = [position for position, step in enumerate(steps) if step is not None]
    position = dims[layout.axis]
    selected, others = steps[position], [*steps[:position], *steps[position + 1 :]]
    if selected == slice(None):
        axis = sum(not isinstance(step, int) for step in steps[:position])
        return lower_channelwise(builder, node, source, axis)
    if isinstance(selected, int) or any(step != slice(None) for step in others):
        return False
    start, stop, step = selected.indices(value.shape[layout.axis])
    return step == 1 and lower_split(builder, node, source, layout.axis, [(start, stop)])


def lower_unbind(builder: Builder, node: fx.Node, source: fx.Node, dim: int) -> bool:
    """Lower the selection of every entry along an axis other than the channels."""
    layout = builder.layout(source)
    if layout is None:
        return lower_channelwise(builder, node, source)
    dim %= source.meta["value"].dim()
    if dim == layout.axis:
        return False
    part = ChannelLayout(layout.axis - (dim < layout.axis), layout.spans)
    layouts = [part] * len(node.meta["value"])
    return builder.replay(node, layouts, {source: builder.slot(source)})
