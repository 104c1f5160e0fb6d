"""The algebra of channels, on small examples."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.nn.compiler import channels
from pliant.nn.compiler.channels import AllOf, AnyOf, ChannelSpan, Expression, SiteFilter
from pliant.rng import rng_stream

A, B, C = SiteFilter(0), SiteFilter(1), SiteFilter(2)
SIZES = (4, 4, 3)
MASKS = [
    np.array([True, False, True, False]),
    np.array([False, False, True, True]),
    np.array([True, True, False]),
]


def find_positions(*spans: ChannelSpan) -> list[int]:
    return channels.find_positions(spans, MASKS).tolist()


def test_positions_continue_across_spans() -> None:
    spans = (ChannelSpan(4, A), ChannelSpan(2), ChannelSpan(3, C))
    assert channels.width(spans) == 9
    assert find_positions(*spans) == [0, 2, 4, 5, 6, 7]
    assert channels.count(spans, MASKS) == 6


def test_a_flattened_channel_repeats_for_its_pixels() -> None:
    assert find_positions(ChannelSpan(4, A, repeat=2), ChannelSpan(1)) == [0, 1, 4, 5, 8]


def test_unions_and_intersections() -> None:
    assert find_positions(ChannelSpan(4, channels.union(A, B))) == [0, 2, 3]
    assert find_positions(ChannelSpan(4, channels.intersect(A, B))) == [2]
    assert channels.union(A, None) is None
    assert channels.intersect(A, None) == A
    assert channels.union(A, A) == A
    assert channels.union(channels.union(A, B), C) == AnyOf(frozenset({A, B, C}))


def test_a_slice_keeps_its_start() -> None:
    spans = (ChannelSpan(4, A), ChannelSpan(3, C))
    assert channels.slice_spans(spans, 2, 5) == (
        ChannelSpan(2, SiteFilter(0, 2)),
        ChannelSpan(1, C),
    )
    assert channels.slice_spans((ChannelSpan(4, A, repeat=2),), 2, 6) == (
        ChannelSpan(2, SiteFilter(0, 1), 2),
    )
    assert channels.slice_spans((ChannelSpan(4, A, repeat=2),), 1, 6) is None
    assert channels.shift(AnyOf(frozenset({A, B})), 2) == AnyOf(
        frozenset({SiteFilter(0, 2), SiteFilter(1, 2)})
    )


def test_alignment_splits_spans_at_each_others_ends() -> None:
    pairs = channels.align(
        (ChannelSpan(4, A), ChannelSpan(3, C)), (ChannelSpan(3), ChannelSpan(4, B))
    )
    assert pairs == [
        (ChannelSpan(3, A), ChannelSpan(3)),
        (ChannelSpan(1, SiteFilter(0, 3)), ChannelSpan(1, B)),
        (ChannelSpan(3, C), ChannelSpan(3, SiteFilter(1, 1))),
    ]
    assert channels.align((ChannelSpan(4, A),), (ChannelSpan(3),)) is None


def test_equal_factors_are_one_number() -> None:
    scales = (2.0, 4.0, 2.0)
    first, second = (
        ChannelSpan(4, A, pending_sites=frozenset({0})),
        ChannelSpan(4, B, pending_sites=frozenset({1})),
    )
    third = ChannelSpan(3, C, pending_sites=frozenset({2}))
    assert channels.compute_factors((first, third), MASKS, scales) == 2.0
    factors = channels.compute_factors((first, second, ChannelSpan(1)), MASKS, scales)
    assert isinstance(factors, np.ndarray)
    assert factors.tolist() == [2.0, 2.0, 4.0, 4.0, 1.0]


def test_an_empty_value_gets_its_first_channel_back() -> None:
    masks = [mask.copy() for mask in MASKS]
    spans = (
        ChannelSpan(1, SiteFilter(0, 1)),
        ChannelSpan(1, AllOf(frozenset({SiteFilter(0, 3), SiteFilter(1, 0)}))),
    )
    channels.restore_one(spans, masks)
    assert channels.count(spans, masks) == 1
    assert masks[0].tolist() == [True, True, True, False]
    channels.restore_one(spans, masks)
    assert masks[0].tolist() == [True, True, True, False], "a value with channels does not change"


def test_full_sites_and_dense_channels_are_never_empty() -> None:
    assert channels.is_never_empty(ChannelSpan(4, A), SIZES)
    assert channels.is_never_empty(ChannelSpan(4), SIZES)
    assert channels.is_never_empty(ChannelSpan(4, channels.union(A, B)), SIZES)
    assert not channels.is_never_empty(ChannelSpan(2, A), SIZES)
    assert not channels.is_never_empty(ChannelSpan(4, channels.intersect(A, B)), SIZES)


filters = st.builds(SiteFilter, st.integers(0, 2), st.integers(0, 2))
expressions = st.recursive(
    filters,
    lambda inner: st.builds(
        lambda kind, parts: kind(frozenset(parts)) if len(set(parts)) > 1 else parts[0],
        st.sampled_from([AnyOf, AllOf]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=6,
)


def is_present(expression: Expression, is_kept: dict[SiteFilter, bool]) -> bool:
    if expression is None:
        return True
    if isinstance(expression, SiteFilter):
        return is_kept[expression]
    combine = any if isinstance(expression, AnyOf) else all
    return combine(is_present(part, is_kept) for part in expression.parts)


@given(expressions, st.lists(st.floats(0.1, 1), min_size=3, max_size=3))
def test_the_probability_of_a_channel_is_the_sum_over_all_masks(
    expression: Expression, keep: list[float]
) -> None:
    site_filters = [SiteFilter(site, start) for site in range(3) for start in range(3)]
    expected = 0.0
    for bits in product([True, False], repeat=9):
        is_kept = dict(zip(site_filters, bits, strict=True))
        if is_present(expression, is_kept):
            expected += prod(keep[f.site] if is_kept[f] else 1 - keep[f.site] for f in site_filters)

    def keep_probability(site: int, num_kept: int, num_dropped: int) -> float:
        return keep[site] ** num_kept * (1 - keep[site]) ** num_dropped

    probability = channels.compute_probability(expression, keep_probability, {})
    assert probability == pytest.approx(expected, abs=1e-12)


def test_two_filters_of_one_site_are_independent() -> None:
    def keep_probability(site: int, num_kept: int, num_dropped: int) -> float:
        return 0.5 ** (num_kept + num_dropped)

    expression = channels.union(SiteFilter(0, 0), SiteFilter(0, 2))
    assert channels.compute_probability(expression, keep_probability, {}) == 0.75


@given(st.permutations(range(14)), st.integers(0, 100))
def test_every_channel_keeps_its_own_mask_and_factor_in_another_order(
    order: list[int], seed: int
) -> None:
    rng = rng_stream(seed, "masks")
    masks = [rng.random(5) < 0.5, rng.random(3) < 0.5]
    spans = (
        ChannelSpan(5, SiteFilter(0), 1, frozenset({0})),
        ChannelSpan(3, SiteFilter(1), 2, frozenset({1})),
        ChannelSpan(3),
    )
    present = np.concatenate([masks[0], np.repeat(masks[1], 2), [True] * 3])
    factors = np.repeat([2.0, 3.0, 1.0], [5, 6, 3])
    permuted = channels.permute(spans, order)
    kept = present[order]
    assert channels.width(permuted) == 14
    assert channels.find_positions(permuted, masks).tolist() == np.flatnonzero(kept).tolist()
    assert channels.count(permuted, masks) == kept.sum()
    scaled = channels.compute_factors(permuted, masks, [2.0, 3.0])
    assert np.array_equal(np.broadcast_to(scaled, kept.sum()), factors[order][kept])


def test_a_permutation_has_as_few_spans_as_possible() -> None:
    spans = (ChannelSpan(3, SiteFilter(0)),) * 2
    # the same filters side by side are one span of repeated channels
    assert channels.permute(spans, [0, 3, 1, 4, 2, 5]) == (ChannelSpan(3, SiteFilter(0), 2),)
    assert channels.permute(spans, [1, 2, 0, 3, 4, 5]) == (
        ChannelSpan(2, SiteFilter(0, 1)),
        ChannelSpan(1, SiteFilter(0), 2),
        ChannelSpan(2, SiteFilter(0, 1)),
    )
