"""Rules for operations that move, join or split channels."""

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from torch import Tensor, fx

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan
from pliant.nn.compiler.program import BoundProgram, ChannelIndex, Env
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


def lower_concatenate(builder: Builder, node: fx.Node, parts: list[fx.Node], dim: int) -> bool:
    """Lower a concatenation of channels, or of equal layouts along another axis."""
    dim %= node.meta["value"].dim()
    layouts = [builder.layout(part) for part in parts]
    if all(layout is None for layout in layouts):
        return lower_channelwise(builder, node, parts[0])
    if all(layout == layouts[0] for layout in layouts) and layouts[0] and layouts[0].axis != dim:
        return lower_channelwise(builder, node, parts[0])
    if any(layout is not None and layout.axis != dim for layout in layouts):
        return False
    spans = tuple(
        span
        for part, layout in zip(parts, layouts, strict=True)
        for span in (layout.spans if layout else (ChannelSpan(part.meta["value"].shape[dim]),))
    )
    return builder.replay(
        node, ChannelLayout(dim, spans), {part: builder.slot(part) for part in parts}
    )


def lower_reshape(builder: Builder, node: fx.Node, source: fx.Node) -> bool:
    """Lower a reshape that keeps the channel axis, or flattens later axes into it."""
    layout = builder.layout(source)
    if layout is None:
        return lower_channelwise(builder, node, source)
    before, after = source.meta["value"].shape, node.meta["value"].shape
    axis, spans = layout.axis, layout.spans
    if len(after) <= axis or before[:axis] != after[:axis]:
        return False
    tail = tuple(-1 if size % BATCH == 0 else size for size in after[axis + 1 :])
    if after[axis] == prod(before[axis:]) and after[axis] != before[axis]:
        repeat = prod(before[axis + 1 :])
        spans = tuple(replace(span, repeat=span.repeat * repeat) for span in spans)
    elif after[axis] != before[axis]:
        return False
    slot = builder.slot(source)
    query = builder.add_query(lambda index: index.count(spans))

    def run(env: Env, bound: BoundProgram) -> Tensor:
        x: Tensor = env[slot]
        return x.reshape(*x.shape[:axis], bound.results[query], *tail)

    return builder.emit(node, run, [slot], ChannelLayout(axis, spans))


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
        position, missing = steps.index(Ellipsis), value.dim() - len(steps) + 1
        steps = (*steps[:position], *[slice(None)] * missing, *steps[position + 1 :])
    if not all(isinstance(step, slice) for step in steps):
        return False
    steps = (*steps, *[slice(None)] * (value.dim() - len(steps)))
    selected = steps[layout.axis]
    others = [step == slice(None) for dim, step in enumerate(steps) if dim != layout.axis]
    if selected == slice(None):
        return lower_channelwise(builder, node, source)
    start, stop, step = selected.indices(value.shape[layout.axis])
    if step != 1 or not all(others):
        return False
    return lower_split(builder, node, source, layout.axis, [(start, stop)])
