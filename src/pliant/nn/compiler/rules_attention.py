"""Rules for attention, whose heads are whole filters, and for embeddings."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import fx

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelLayout
from pliant.nn.compiler.program import LayerCost
from pliant.nn.compiler.shared_masks import couple_parts, couple_sites
from pliant.nn.compiler.trace import BATCH


@dataclass(frozen=True)
class Embedding:
    """A table of vectors, from a module or from a functional call."""

    source: fx.Node
    weight: str
    padding: int | None


def lower_matrix_product(builder: Builder, node: fx.Node, left: Any, right: Any) -> bool:
    """Lower a product of matrices whose channels are heads, rows of the left or columns."""
    values = [side.meta["value"] for side in (left, right)]
    first, second = builder.layout(left), builder.layout(right)
    dims = node.meta["value"].dim()
    if any(value.dim() < 2 for value in values) or (first is None and second is None):
        return False
    if first is not None and second is not None:
        pair = _match_heads(builder, [left, right], dims)
        if pair is None:
            return False
        return _emit_product(builder, node, pair, left, right)
    side, layout = (left, first) if first is not None else (right, second)
    assert layout is not None
    contracted = values[0].dim() - 1 if side is left else values[1].dim() - 2
    other = values[1] if side is left else values[0]
    axis = layout.axis + dims - side.meta["value"].dim()
    is_matrix_axis = axis >= dims - 2
    if layout.axis == contracted:
        return False
    own_axis = axis - (dims - other.dim())  # of the same dimension in the other factor
    if not is_matrix_axis and own_axis >= 0 and other.shape[own_axis] != 1:
        return False
    return _emit_product(builder, node, ChannelLayout(axis, layout.spans), left, right)


def _emit_product(
    builder: Builder, node: fx.Node, layout: ChannelLayout, left: fx.Node, right: fx.Node
) -> bool:
    inner = left.meta["value"].shape[-1]
    macs = node.meta["value"].numel() * inner // BATCH // channels.width(layout.spans)
    builder.record_cost(node, LayerCost(node.name, macs, layout.spans, None))
    return builder.replay(node, layout, {n: builder.slot(n) for n in (left, right)})


def lower_attention(builder: Builder, node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Lower scaled dot-product attention whose channels are heads."""
    sources = [arguments[name] for name in ("query", "key", "value")]
    query, key, value = (source.meta["value"] for source in sources)
    if arguments.get("enable_gqa") or any(builder.layout(source) is None for source in sources):
        return False
    layout = _match_heads(builder, sources, query.dim())
    mask = arguments.get("attn_mask")
    if layout is None or layout.axis >= query.dim() - 2:
        return False
    if isinstance(mask, fx.Node):
        axis = layout.axis - (query.dim() - mask.meta["value"].dim())
        if builder.layout(mask) or (axis >= 0 and mask.meta["value"].shape[axis] != 1):
            return False
    pairs = query.numel() // query.shape[-1] * key.shape[-2] // BATCH
    macs = pairs * (query.shape[-1] + value.shape[-1]) // channels.width(layout.spans)
    builder.record_cost(node, LayerCost(node.name, macs, layout.spans, None))
    return builder.replay(node, layout, {n: builder.slot(n) for n in node.all_input_nodes})


def _match_heads(builder: Builder, sides: list[fx.Node], dims: int) -> ChannelLayout | None:
    """Let values share the mask of one axis before the last two; None if they cannot."""
    layouts = [builder.layout(side) for side in sides]
    axes = set()
    for side, layout in zip(sides, layouts, strict=True):
        assert layout is not None
        axes.add(layout.axis + dims - side.meta["value"].dim())
    if len(axes) != 1 or min(axes) >= dims - 2:
        return None
    spans = [layout.spans for layout in layouts if layout is not None]
    for other in spans[1:]:
        if other != spans[0]:
            pairs = channels.align(spans[0], other)
            # lowering restarts if one of these decides something
            if pairs is None or not (couple_parts(builder, pairs) or couple_sites(builder, pairs)):
                return None
    return ChannelLayout(axes.pop(), spans[0])


def lower_embedding(builder: Builder, node: fx.Node, table: Embedding) -> bool:
    """Lower a table of vectors, whose entries are filters."""
    slot, weight, padding = builder.slot(table.source), table.weight, table.padding
    axis = node.meta["value"].dim() - 1
    spans = builder.find_output_spans(weight, node.meta["value"].shape[axis])
    builder.record_slicing(weight, None, spans)
    builder.mark_varying(node)  # even if it looks up constants, as its entries may be absent
    return builder.emit(
        node,
        lambda env, bound: F.embedding(env[slot], bound.params[weight], padding),
        [slot],
        ChannelLayout(axis, spans) if spans else None,
        weight,
    )
