"""Rules for arithmetic on values whose channels may come from different sites."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder, Slots
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans
from pliant.nn.compiler.program import BoundProgram, Env, broadcast_shape, scatter_channels
from pliant.nn.compiler.rules_shapes import lower_channelwise, select_kept, slice_dense
from pliant.nn.compiler.shared_masks import SpanPairs, couple_parts, couple_sites

NodePair = tuple[fx.Node, fx.Node]


def lower_binary(builder: Builder, node: fx.Node, left: Any, right: Any, kind: str) -> bool:
    """Lower a sum, difference, product or quotient of values, scalars or parameters."""
    nodes = [side for side in (left, right) if _is_tensor(side)]
    varying = [side for side in nodes if not builder.is_constant(side)]
    if len(varying) == 1:
        others = [side for side in nodes if side is not varying[0]]
        layout = builder.layout(varying[0])
        if not others or layout is None:
            return lower_channelwise(builder, node, varying[0])
        if kind == "div" and left is not varying[0]:
            return False
        return _lower_with_dense(builder, node, varying[0], others[0])
    if len(varying) != 2:
        return lower_channelwise(builder, node, nodes[0]) if nodes else False
    first, second = builder.layout(left), builder.layout(right)
    if first is None and second is None:
        return lower_channelwise(builder, node, left)
    if first is None or second is None:
        sparse, dense = (right, left) if first is None else (left, right)
        is_scaled = kind == "mul" or (kind == "div" and sparse is left)
        return is_scaled and _lower_with_dense(builder, node, sparse, dense)
    dims = [side.meta["value"].dim() for side in (left, right)]
    if dims[0] - first.axis != dims[1] - second.axis:
        return False
    if first.spans == second.spans:
        return lower_channelwise(builder, node, left if dims[0] >= dims[1] else right)
    pairs = channels.align(first.spans, second.spans)
    if pairs is not None and kind in {"mul", "div"} and couple_parts(builder, pairs):
        return lower_channelwise(builder, node, left)  # lowering restarts
    if pairs is None:
        return False
    axis = max(dims) - (dims[0] - first.axis)
    if builder.decisions.coupled and couple_sites(builder, pairs):
        return lower_channelwise(builder, node, left)  # lowering restarts with coupled sites
    if kind == "div":
        return False
    join = _join_product if kind == "mul" else _join_sum
    return builder.replay(node, *join(builder, (left, right), pairs, axis))


def _is_tensor(side: Any) -> bool:
    return isinstance(side, fx.Node) and isinstance(side.meta.get("value"), Tensor)


def _lower_with_dense(builder: Builder, node: fx.Node, sparse: fx.Node, dense: fx.Node) -> bool:
    """Lower arithmetic with a value or parameter of which only the present channels are needed.

    A parameter is sliced like the scale and bias of a norm layer.
    """
    layout, shape = builder.layout(sparse), dense.meta["value"].shape
    assert layout is not None
    axis = layout.axis - (sparse.meta["value"].dim() - len(shape))  # of the channels in `dense`
    if axis > layout.axis:
        return False
    if axis < 0 or shape[axis] == 1:
        return lower_channelwise(builder, node, sparse)
    slots = {sparse: builder.slot(sparse), dense: slice_dense(builder, dense, axis, layout.spans)}
    name = builder.param_name(dense) or builder.param_view(dense)
    return builder.replay(node, layout, slots, name)


def _join_sum(
    builder: Builder, sides: NodePair, pairs: SpanPairs, axis: int
) -> tuple[ChannelLayout, Slots]:
    """Join values with different masks for their sum: rescale each, and keep the union."""
    result = tuple(
        ChannelSpan(left.size, channels.union(left.expression, right.expression), left.repeat)
        for left, right in pairs
    )
    count = builder.add_query(lambda index: index.count(result))
    slots = {
        side: _spread(builder, side, spans, result, count)
        for side, spans in zip(sides, zip(*pairs, strict=True), strict=True)
    }
    return ChannelLayout(axis, result), slots


def _spread(
    builder: Builder, side: fx.Node, spans: ChannelSpans, result: ChannelSpans, count: int
) -> int:
    """Add the instruction that rescales a value and scatters it over the channels of the result."""
    slot, layout = builder.slot(side), builder.layout(side)
    assert layout is not None
    axis = layout.axis
    factors = builder.add_factors(spans, broadcast_shape(axis, side.meta["value"].dim()))
    query = builder.add_query(lambda index: index.to_index_tensor(index.find(spans, result)))

    def run(env: Env, bound: BoundProgram) -> Tensor:
        x, size = bound.scale(env[slot], factors), bound.results[count]
        if x.shape[axis] == size:
            return x
        return scatter_channels(x, axis, size, bound.results[query])

    return builder.add_instruction(f"{side.name}_spread", run, (slot,))


def _join_product(
    builder: Builder, sides: NodePair, pairs: SpanPairs, axis: int
) -> tuple[ChannelLayout, Slots]:
    """Join values with different masks for their product: keep the intersection, both factors."""
    result = tuple(
        ChannelSpan(
            left.size,
            channels.intersect(left.expression, right.expression),
            left.repeat,
            left.pending_sites | right.pending_sites,
        )
        for left, right in pairs
    )
    slots = {}
    for side, spans in zip(sides, zip(*pairs, strict=True), strict=True):
        layout = builder.layout(side)
        assert layout is not None
        slots[side] = select_kept(builder, side, layout.axis, result, spans)
    return ChannelLayout(axis, result), slots


def lower_weight_norm(
    builder: Builder, node: fx.Node, weight: fx.Node, size: fx.Node, dim: int = 0
) -> bool:
    """Lower `size * weight / norm(weight)`, where each entry along `dim` has its own norm."""
    layout = builder.layout(weight)
    if layout != builder.layout(size) or (layout is not None and layout.axis != dim):
        return False
    return lower_channelwise(builder, node, weight)


_BINARY_FUNCTIONS = {
    "add": (operator.add, operator.iadd, torch.add),
    "sub": (operator.sub, operator.isub, torch.sub),
    "mul": (operator.mul, operator.imul, torch.mul),
    "div": (operator.truediv, operator.itruediv, torch.div),
}
BINARY_OPERATIONS: dict[Any, str] = {
    target: kind
    for kind, functions in _BINARY_FUNCTIONS.items()
    for target in (*functions, kind, f"{kind}_")
}
