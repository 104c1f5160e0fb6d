"""Rules for arithmetic on values whose channels may come from different sites."""

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import InstructionFn, ProgramBuilder, broadcast_shape
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans, SiteFilter
from pliant.nn.compiler.program import BoundProgram, Environment
from pliant.nn.compiler.rules_shapes import lower_channelwise

NodePair = tuple[fx.Node, fx.Node]
SpanPairs = list[tuple[ChannelSpan, ChannelSpan]]


def lower_binary(builder: ProgramBuilder, node: fx.Node, left: Any, right: Any, kind: str) -> bool:
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
        return _lower_with_param(builder, node, varying[0], others[0])
    if len(varying) != 2:
        return lower_channelwise(builder, node, nodes[0]) if nodes else False
    first, second = builder.layout(left), builder.layout(right)
    if first is None and second is None:
        return lower_channelwise(builder, node, left)
    if first is None or second is None:
        return kind == "mul" and _lower_gate(builder, node, left, right)
    dims = [side.meta["value"].dim() for side in (left, right)]
    if dims[0] - first.axis != dims[1] - second.axis:
        return False
    if first == second:
        return lower_channelwise(builder, node, left if dims[0] >= dims[1] else right)
    pairs = channels.align(first.spans, second.spans)
    if pairs is None or kind == "div":
        return False
    axis = max(dims) - (dims[0] - first.axis)
    if builder.decisions.coupled and _couple_sites(builder, pairs):
        return lower_channelwise(builder, node, left)  # lowering restarts with coupled sites
    builder.track_gradient(node)
    lower_join = _lower_sum if kind in {"add", "sub"} else _lower_product
    lower_join(builder, node, (left, right), pairs, axis)
    return True


def _is_tensor(side: Any) -> bool:
    return isinstance(side, fx.Node) and isinstance(side.meta.get("value"), Tensor)


def _couple_sites(builder: ProgramBuilder, pairs: SpanPairs) -> bool:
    """Couple sites that meet channel by channel; False if there are none or some cannot be."""
    coupled = []
    for pair in pairs:
        if pair[0].expression == pair[1].expression:
            continue
        sites = []
        for span in pair:
            expression = span.expression
            if (
                not isinstance(expression, SiteFilter)
                or expression.start
                or span.size != builder.groups[expression.site].filters
            ):
                return False
            sites.append(expression.site)
        coupled.append(sites)
    for left, right in coupled:
        builder.couple(left, right)
    return bool(coupled)


def _lower_with_param(
    builder: ProgramBuilder, node: fx.Node, value: fx.Node, param_node: fx.Node
) -> bool:
    """Lower arithmetic with a parameter, sliced like the scale and bias of a norm layer."""
    layout, shape = builder.layout(value), param_node.meta["value"].shape
    assert layout is not None
    dims = value.meta["value"].dim()
    param_axis = layout.axis - (dims - len(shape))
    if len(shape) > dims:
        return False
    if param_axis < 0 or shape[param_axis] == 1:
        return lower_channelwise(builder, node, value)
    spans, name = layout.spans, builder.param_name(param_node)
    slots = {value: builder.slot(value)}
    builder.track_gradient(node, name)
    if name is not None and not builder.is_unsliced(name):
        builder.record_slicing(name, *[None] * param_axis, spans)
        slots[param_node] = builder.load_param(name)
    else:
        slots[param_node] = _select_kept(builder, param_node, param_axis, spans)
    builder.replay(node, layout, slots)
    return True


def _lower_gate(builder: ProgramBuilder, node: fx.Node, left: fx.Node, right: fx.Node) -> bool:
    """Lower a product with a dense value, of which only the present channels are needed."""
    sparse, dense = (left, right) if builder.layout(left) is not None else (right, left)
    layout, shape = builder.layout(sparse), dense.meta["value"].shape
    assert layout is not None
    dense_axis = layout.axis - (sparse.meta["value"].dim() - len(shape))
    if dense_axis > layout.axis:
        return False
    slots = {sparse: builder.slot(sparse), dense: builder.slot(dense)}
    builder.track_gradient(node)
    if dense_axis >= 0 and shape[dense_axis] != 1:
        slots[dense] = _select_kept(builder, dense, dense_axis, layout.spans)
    builder.replay(node, layout, slots)
    return True


def _select_kept(builder: ProgramBuilder, node: fx.Node, axis: int, spans: ChannelSpans) -> int:
    """Add the instruction that selects the kept channels of a dense value."""
    slot = builder.slot(node)
    query = builder.register_query(lambda index: index.to_index_tensor(index.positions(spans)))
    return builder.add_instruction(f"{node.name}_kept", _make_select(slot, axis, query), (slot,))


def _lower_sum(
    builder: ProgramBuilder, node: fx.Node, sides: NodePair, pairs: SpanPairs, axis: int
) -> None:
    """Lower a sum of values with different masks: rescale each, and keep the union."""
    result_spans = tuple(
        ChannelSpan(left.size, channels.union(left.expression, right.expression), left.repeat)
        for left, right in pairs
    )
    count_query = builder.register_query(lambda index: index.count(result_spans))
    slots = {}
    for side_index, side in enumerate(sides):
        spans = tuple(pair[side_index] for pair in pairs)
        slots[side] = builder.add_instruction(
            f"{side.name}_spread",
            _make_scatter(builder, side, spans, result_spans, count_query),
            (builder.slot(side),),
        )
    builder.replay(node, ChannelLayout(axis, result_spans), slots)


def _make_scatter(
    builder: ProgramBuilder,
    side: fx.Node,
    spans: ChannelSpans,
    result_spans: ChannelSpans,
    count_query: int,
) -> InstructionFn:
    slot, layout = builder.slot(side), builder.layout(side)
    assert layout is not None
    axis = layout.axis
    factors = builder.register_factors(spans, broadcast_shape(axis, side.meta["value"].dim()))
    query = builder.register_query(
        lambda index: index.to_index_tensor(
            np.searchsorted(index.positions(result_spans), index.positions(spans))
        )
    )

    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        x: Tensor = environment[slot]
        if factors is not None and (factor := bound.query_results[factors]) is not None:
            x = x * factor
        if x.shape[axis] == bound.query_results[count_query]:
            return x
        shape = list(x.shape)
        shape[axis] = bound.query_results[count_query]
        return x.new_zeros(shape).index_copy(axis, bound.query_results[query], x)

    return run


def _lower_product(
    builder: ProgramBuilder, node: fx.Node, sides: NodePair, pairs: SpanPairs, axis: int
) -> None:
    """Lower a product of values with different masks: keep the intersection and both factors."""
    result_spans = tuple(
        ChannelSpan(
            left.size,
            channels.intersect(left.expression, right.expression),
            left.repeat,
            left.pending_sites | right.pending_sites,
        )
        for left, right in pairs
    )
    slots = {}
    for side_index, side in enumerate(sides):
        spans = tuple(pair[side_index] for pair in pairs)
        layout, slot = builder.layout(side), builder.slot(side)
        assert layout is not None
        query = builder.register_query(
            lambda index, spans=spans: index.to_index_tensor(  # type: ignore[misc] # binds the loop variable
                np.searchsorted(index.positions(spans), index.positions(result_spans))
            )
        )
        slots[side] = builder.add_instruction(
            f"{side.name}_kept", _make_select(slot, layout.axis, query), (slot,)
        )
    builder.replay(node, ChannelLayout(axis, result_spans), slots)


def _make_select(slot: int, axis: int, query: int) -> InstructionFn:
    def run(environment: Environment, bound: BoundProgram) -> Tensor:
        x: Tensor = environment[slot]
        return x.index_select(axis, bound.query_results[query])

    return run


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
