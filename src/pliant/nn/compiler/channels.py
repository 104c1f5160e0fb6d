"""Which channels of a value are present: an algebra over the filters that sites keep.

A value's channels are a sequence of spans. Within a span, presence follows one expression: always
present, kept by a site, kept by any of several, or kept by all of them. The algebra gives the exact
channels of a subnet and their exact probabilities.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]
MANY_SPANS = 8  # from here, all are looked up at once
MAX_TABLES = 1 << 12
# arguments: a site, a number of filters that it keeps, a number of others that it drops
KeepProbability = Callable[[int, int, int], float]


@dataclass(frozen=True)
class SiteFilter:
    """Channel j is present if the site keeps its filter start + j."""

    site: int
    start: int = 0


@dataclass(frozen=True)
class AnyOf:
    """Union of expressions."""

    parts: "frozenset[SiteFilter | AnyOf | AllOf]"


@dataclass(frozen=True)
class AllOf:
    """Intersection of expressions."""

    parts: "frozenset[SiteFilter | AnyOf | AllOf]"


Expression = SiteFilter | AnyOf | AllOf | None  # None: always present


@dataclass(frozen=True)
class ChannelSpan:
    """A run of `size` channels, each repeated `repeat` times (e.g. after flattening).

    `pending_sites` are the sites whose factor 1/q is not yet applied.
    """

    size: int
    expression: Expression = None
    repeat: int = 1
    pending_sites: frozenset[int] = frozenset()


ChannelSpans = tuple[ChannelSpan, ...]


@dataclass(frozen=True)
class ChannelLayout:
    """The spans along the channel axis of a value."""

    axis: int
    spans: ChannelSpans


def width(spans: Iterable[ChannelSpan]) -> int:
    """Return the number of channels in the full network."""
    return sum(span.size * span.repeat for span in spans)


def is_dense(spans: ChannelSpans) -> bool:
    """Return whether every channel is always present, with no factor pending."""
    return all(span.expression is None and not span.pending_sites for span in spans)


def collect_filters(expression: Expression) -> frozenset[SiteFilter]:
    """Return the filters that decide about the first channel of an expression."""
    if expression is None:
        return frozenset()
    if isinstance(expression, SiteFilter):
        return frozenset({expression})
    return frozenset[SiteFilter]().union(*map(collect_filters, expression.parts))


def collect_sites(expression: Expression) -> frozenset[int]:
    return frozenset(site_filter.site for site_filter in collect_filters(expression))


def shift(expression: Expression, by: int) -> Expression:
    """Return the expression for channels that start `by` later."""
    if expression is None or by == 0:
        return expression
    if isinstance(expression, SiteFilter):
        return SiteFilter(expression.site, expression.start + by)
    shifted = (shift(part, by) for part in expression.parts)
    return type(expression)(frozenset(part for part in shifted if part is not None))


def union(left: Expression, right: Expression) -> Expression:
    if left is None or right is None:
        return None
    parts = _flatten(AnyOf, left) | _flatten(AnyOf, right)
    return AnyOf(parts) if len(parts) > 1 else left


def intersect(left: Expression, right: Expression) -> Expression:
    if left is None or right is None:
        return right if left is None else left
    parts = _flatten(AllOf, left) | _flatten(AllOf, right)
    return AllOf(parts) if len(parts) > 1 else left


def _flatten(
    kind: type[AnyOf | AllOf], part: SiteFilter | AnyOf | AllOf
) -> frozenset[SiteFilter | AnyOf | AllOf]:
    return part.parts if type(part) is kind else frozenset({part})


def is_never_empty(span: ChannelSpan, sizes: Sequence[int]) -> bool:
    """Return whether every subnet keeps some channel, as each site keeps a filter."""
    expression = span.expression
    parts = expression.parts if isinstance(expression, AnyOf) else (expression,)
    return any(
        part is None
        or (isinstance(part, SiteFilter) and part.start == 0 and span.size == sizes[part.site])
        for part in parts
    )


def restore_one(spans: ChannelSpans, masks: Sequence[Mask]) -> None:
    """If a value has no channel left, keep the filters of its first one."""
    if count(spans, masks) == 0:
        pending: list[Expression] = [spans[0].expression]
        while pending:
            part = pending.pop()
            if isinstance(part, SiteFilter):
                masks[part.site][part.start] = True
            elif part is not None:
                pending.extend(part.parts)


def slice_spans(spans: ChannelSpans, start: int, stop: int) -> ChannelSpans | None:
    """Return the spans of channels start to stop; None if that would split a repeated channel."""
    result, offset = [], 0
    for span in spans:
        low = max(start - offset, 0)
        high = min(stop - offset, span.size * span.repeat)
        offset += span.size * span.repeat
        if low >= high:
            continue
        if low % span.repeat or high % span.repeat:
            return None
        low, high = low // span.repeat, high // span.repeat
        result.append(replace(span, size=high - low, expression=shift(span.expression, low)))
    return tuple(result)


def align(left: ChannelSpans, right: ChannelSpans) -> list[tuple[ChannelSpan, ChannelSpan]] | None:
    """Pair the channels of two values of equal width, splitting spans at each other's ends."""
    if width(left) != width(right):
        return None
    widths = [[span.size * span.repeat for span in spans] for spans in (left, right)]
    pairs = []
    for start, stop in pairwise(sorted({0, *accumulate(widths[0]), *accumulate(widths[1])})):
        a, b = slice_spans(left, start, stop), slice_spans(right, start, stop)
        if a is None or b is None:
            return None
        if a[0].repeat != b[0].repeat:
            if is_dense(a):
                a = (ChannelSpan(b[0].size, None, b[0].repeat),)
            elif is_dense(b):
                b = (ChannelSpan(a[0].size, None, a[0].repeat),)
            else:
                return None
        pairs.append((a[0], b[0]))
    return pairs


def permute(spans: ChannelSpans, order: Sequence[int]) -> ChannelSpans:
    """Return the channels in another order, in as few spans as possible."""
    singles = [
        ChannelSpan(1, shift(span.expression, offset), 1, span.pending_sites)
        for span in spans
        for offset in range(span.size)
        for _ in range(span.repeat)
    ]
    repeated: list[ChannelSpan] = []
    for channel in order:
        single = singles[channel]
        if repeated and replace(repeated[-1], repeat=1) == single:
            repeated[-1] = replace(single, repeat=repeated[-1].repeat + 1)
        else:
            repeated.append(single)
    result: list[ChannelSpan] = []
    for span in repeated:
        last = result[-1] if result else None
        if last and replace(last, size=1, expression=shift(last.expression, last.size)) == span:
            result[-1] = replace(last, size=last.size + 1)
        else:
            result.append(span)
    return tuple(result)


def compute_mask(span: ChannelSpan, masks: Sequence[Mask]) -> Mask:
    """Return which channels of a span are present, before repeating."""
    return _evaluate(span.expression, span.size, masks)


def _evaluate(expression: Expression, size: int, masks: Sequence[Mask]) -> Mask:
    if expression is None:
        return np.ones(size, np.bool_)
    if isinstance(expression, SiteFilter):
        return masks[expression.site][expression.start : expression.start + size]
    parts = [_evaluate(part, size, masks) for part in expression.parts]
    combine = np.logical_or if isinstance(expression, AnyOf) else np.logical_and
    return np.asarray(combine.reduce(parts), np.bool_)


@dataclass(frozen=True)
class SpanTable:
    """The site and filter that decide each channel (-1: always present), and its pending site."""

    sites: Index
    filters: Index
    pending_sites: Index  # -1: none


# by identity, as hashing many spans takes longer than what the table saves
_tables: dict[int, tuple[ChannelSpans, SpanTable | None]] = {}


def _find_table(spans: ChannelSpans) -> SpanTable | None:
    """Return the table of many spans; None for a few, and where unions or products decide."""
    if len(spans) < MANY_SPANS:
        return None
    known = _tables.get(id(spans))
    if known is None or known[0] is not spans:
        if len(_tables) >= MAX_TABLES:
            _tables.clear()
        known = _tables[id(spans)] = spans, _make_table(spans)
    return known[1]


def _make_table(spans: ChannelSpans) -> SpanTable | None:
    columns: list[tuple[int, int, int]] = []
    for span in spans:
        expression, pending = span.expression, span.pending_sites
        if isinstance(expression, AnyOf | AllOf) or len(pending) > 1:
            return None
        site, start = (expression.site, expression.start) if expression else (-1, 0)
        for offset in range(span.size):
            filter_index = 0 if site < 0 else start + offset
            columns += [(site, filter_index, next(iter(pending), -1))] * span.repeat
    table = np.asarray(columns, np.int64).T
    return SpanTable(*(np.ascontiguousarray(row) for row in table))


def _look_up(table: SpanTable, masks: Sequence[Mask]) -> Mask:
    """Return which channels of many spans are present."""
    bits = np.concatenate([*masks, [True]])
    starts = np.cumsum([0, *map(len, masks)])  # the last one is that of the filter always kept
    present: Mask = bits.take(starts.take(table.sites) + table.filters)
    return present


def find_positions(spans: ChannelSpans, masks: Sequence[Mask]) -> Index:
    """Return the positions of the present channels in the full network."""
    if (table := _find_table(spans)) is not None:
        return np.flatnonzero(_look_up(table, masks))
    span_masks = [compute_mask(span, masks) for span in spans]
    repeats = [span.repeat for span in spans]
    if all(repeat == 1 for repeat in repeats):
        return np.flatnonzero(span_masks[0] if len(span_masks) == 1 else np.concatenate(span_masks))
    repeated = [np.repeat(mask, repeat) for mask, repeat in zip(span_masks, repeats, strict=True)]
    return np.flatnonzero(np.concatenate(repeated))


def count(spans: ChannelSpans, masks: Sequence[Mask]) -> int:
    if (table := _find_table(spans)) is not None:
        return int(_look_up(table, masks).sum())
    return sum(int(compute_mask(span, masks).sum()) * span.repeat for span in spans)


def compute_factors(
    spans: ChannelSpans, masks: Sequence[Mask], scales: Sequence[float]
) -> NDArray[np.float64] | float:
    """Return the pending factor of each present channel, or one number if all are equal."""
    if (table := _find_table(spans)) is not None:
        factors = np.asarray([*scales, 1.0]).take(table.pending_sites)
        is_equal = bool((factors == factors[0]).all())
        return float(factors[0]) if is_equal else factors[_look_up(table, masks)]
    values = [_multiply(scales, span.pending_sites) for span in spans]
    if len(set(values)) == 1:
        return float(values[0])
    counts = [int(compute_mask(span, masks).sum()) * span.repeat for span in spans]
    return np.repeat(np.asarray(values, np.float64), counts)


def _multiply(scales: Sequence[float], sites: frozenset[int]) -> float:
    if len(sites) == 1:  # as nearly always
        return scales[next(iter(sites))]
    return prod((scales[site] for site in sorted(sites)), start=1.0)


def compute_probability(
    expression: Expression, keep: KeepProbability, conditions: Mapping[SiteFilter, bool]
) -> float:
    """Return the probability that a channel is present, given which of some filters are kept."""
    if expression is None:
        return 1.0
    if isinstance(expression, SiteFilter):
        return _compute_filter_probability(expression, keep, conditions)
    is_any = isinstance(expression, AnyOf)
    known = [is_kept for part, is_kept in conditions.items() if part in expression.parts]
    if is_any in known:  # decided by a single part
        return float(is_any)
    parts = [part for part in expression.parts if part not in conditions]
    sites_by_part = [{f.site for f in collect_filters(part) - conditions.keys()} for part in parts]
    sites = set[int]().union(*sites_by_part)
    if sum(map(len, sites_by_part)) == len(sites):  # parts are independent
        probabilities = [compute_probability(part, keep, conditions) for part in parts]
        return 1 - prod(1 - p for p in probabilities) if is_any else prod(probabilities)
    site = max(sites, key=lambda site: (sum(site in part for part in sites_by_part), site))
    open_filters = collect_filters(expression) - conditions.keys()
    pivot = min((f for f in open_filters if f.site == site), key=lambda f: f.start)
    pivot_kept, result = _compute_filter_probability(pivot, keep, conditions), 0.0
    for probability, is_kept in ((pivot_kept, True), (1 - pivot_kept, False)):
        if probability > 0:
            given = {**conditions, pivot: is_kept}
            result += probability * compute_probability(expression, keep, given)
    return result


def _compute_filter_probability(
    site_filter: SiteFilter, keep: KeepProbability, conditions: Mapping[SiteFilter, bool]
) -> float:
    if site_filter in conditions:
        return float(conditions[site_filter])
    site = site_filter.site
    same = [is_kept for other, is_kept in conditions.items() if other.site == site]
    num_kept, num_dropped = same.count(True), same.count(False)
    given = keep(site, num_kept, num_dropped)
    return min(1.0, keep(site, num_kept + 1, num_dropped) / given) if given > 0 else 0.0
