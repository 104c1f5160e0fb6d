"""Rules for arithmetic on values whose channels may come from different sites."""

import operator
from math import gcd
from typing import Any

import torch
from torch import Tensor, fx

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder, Slots, broadcast_shape, scatter_channels
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans, SiteFilter
from pliant.nn.compiler.program import BoundProgram, Env
from pliant.nn.compiler.rules_shapes import lower_channelwise

NodePair = tuple[fx.Node, fx.Node]
SpanPairs = list[tuple[ChannelSpan, ChannelSpan]]


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
        return kind == "mul" and _lower_with_dense(builder, node, sparse, dense)
    dims = [side.meta["value"].dim() for side in (left, right)]
    if dims[0] - first.axis != dims[1] - second.axis:
        return False
    if first == second:
        return lower_channelwise(builder, node, left if dims[0] >= dims[1] else right)
    pairs = channels.align(first.spans, second.spans)
    if pairs is not None and kind in {"mul", "div"} and _couple_parts(builder, pairs):
        return lower_channelwise(builder, node, left)  # lowering restarts
    if pairs is None:
        return False
    axis = max(dims) - (dims[0] - first.axis)
    if builder.decisions.coupled and _couple_sites(builder, pairs):
        return lower_channelwise(builder, node, left)  # lowering restarts with coupled sites
    if kind == "div":
        return False
    join = _join_product if kind == "mul" else _join_sum
    return builder.replay(node, *join(builder, (left, right), pairs, axis))


def _is_tensor(side: Any) -> bool:
    return isinstance(side, fx.Node) and isinstance(side.meta.get("value"), Tensor)


def _couple_parts(builder: Builder, pairs: SpanPairs) -> bool:
    """Let parts of a site that gate each other share a mask; return whether there are any.

    A product keeps one factor 1/q per site, but two filters of it survive less often than one.
    """
    has_parts = False
    for pair in pairs:
        for site in pair[0].pending_sites & pair[1].pending_sites:
            filters = [f for span in pair for f in channels.collect_filters(span.expression)]
            starts = {f.start for f in filters if f.site == site}
            if len(starts) > 1:
                has_parts = True
                period = gcd(builder.groups[site].filters, *(s - min(starts) for s in starts))
                if period > 1:
                    builder.repeat_mask(site, period)
                else:
                    builder.fix(pair, "its parts gate each other")
    return has_parts


def _couple_sites(builder: Builder, pairs: SpanPairs) -> bool:
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
    name, slots = builder.param_name(dense), {sparse: builder.slot(sparse)}
    if name is not None and not builder.is_unsliced(name):
        builder.record_slicing(name, *[None] * axis, layout.spans)
        slots[dense] = builder.load_param(name)
    else:
        slots[dense] = _select_kept(builder, dense, axis, layout.spans)
    return builder.replay(node, layout, slots, name)


def _select_kept(
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
        slots[side] = _select_kept(builder, side, layout.axis, result, spans)
    return ChannelLayout(axis, result), slots


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
