"""Decide which filters share a mask: those that meet, heads of attention, and equal groups."""

import operator
from math import gcd, lcm
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelSpan, ChannelSpans, SiteFilter

SpanPairs = list[tuple[ChannelSpan, ChannelSpan]]
PRODUCTS: set[Any] = {operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"}
ATTENTIONS: set[Any] = {F.scaled_dot_product_attention}
_MIXING_OPERATIONS = PRODUCTS | ATTENTIONS | {torch.einsum}
_MAX_STEPS = 12  # between the split into heads and their product


def couple_parts(builder: Builder, pairs: SpanPairs) -> bool:
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


def couple_sites(builder: Builder, pairs: SpanPairs) -> bool:
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
                return _repeat_like_groups(builder, pairs)
            sites.append(expression.site)
        coupled.append(sites)
    for left, right in coupled:
        builder.couple(left, right)
    return bool(coupled)


def _repeat_like_groups(builder: Builder, pairs: SpanPairs) -> bool:
    """Let a layer that meets one with equal groups repeat its mask, too; False if none does."""
    partners: dict[int, list[ChannelSpan]] = {}
    for pair in pairs:
        for span, other in (pair, pair[::-1]):
            if isinstance(span.expression, SiteFilter):
                partners.setdefault(span.expression.site, []).append(other)
    for site, others in partners.items():
        filters, first = builder.groups[site].filters, others[0]
        is_repeated = len(others) > 1 and all(other == first for other in others)
        is_whole = isinstance(first.expression, SiteFilter) and first.expression.start == 0
        if is_repeated and is_whole and first.size * len(others) == filters:
            builder.repeat_mask(site, first.size)
            return True
    return False


def find_copy(spans: ChannelSpans, copies: int) -> ChannelSpans | None:
    """Return the channels that repeat so many times; None if they do not."""
    size = channels.width(spans) // copies
    parts = [channels.slice_spans(spans, i * size, (i + 1) * size) for i in range(copies)]
    return parts[0] if all(part == parts[0] for part in parts) else None


def merge_filters(builder: Builder, spans: ChannelSpans, count: int) -> bool:
    """Decide that this many adjacent channels become one filter; False if nothing is decided."""
    factors: dict[int, int] = {}
    for span in spans:
        if isinstance(span.expression, SiteFilter):
            factor = lcm(span.repeat, count) // span.repeat
            if span.expression.start % factor or span.size % factor:
                return False
            site = span.expression.site
            factors[site] = lcm(factor, factors.get(site, 1))
        elif span.expression is not None:
            return False
    for site, factor in factors.items():
        if factor > 1:
            builder.merge_filters(site, factor)
    return any(factor > 1 for factor in factors.values())


def couple_copies(builder: Builder, spans: ChannelSpans, copies: int) -> bool:
    """Decide that parts of a value share their masks; False if nothing is decided."""
    size = channels.width(spans) // copies
    first = channels.slice_spans(spans, 0, size)
    for copy in range(1, copies):
        other = channels.slice_spans(spans, copy * size, (copy + 1) * size)
        if first is None or other is None:
            return False
        pairs = channels.align(first, other)
        if pairs is None:
            return False
        if couple_parts(builder, pairs) or couple_sites(builder, pairs):
            return True
    return False


def leads_to_attention(node: fx.Node) -> bool:
    """Return whether a value is read by a product of matrices, maybe after it was moved."""
    seen, readers = {node}, [node]
    for _ in range(_MAX_STEPS):
        readers = [user for reader in readers for user in reader.users if user not in seen]
        if any(reader.target in _MIXING_OPERATIONS for reader in readers):
            return True
        seen.update(readers)
        readers = [r for r in readers if r.op in {"call_function", "call_method"}]
    return False
