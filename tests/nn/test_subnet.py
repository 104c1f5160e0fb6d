"""Sampling of filters: how often, how many, which ones."""

from collections import Counter
from itertools import product
from math import ceil, comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.nn import subnet as subnets
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn
from pliant.nn.pareto_table import uniform_table
from pliant.nn.subnet import Sampling, Subnet
from pliant.rng import rng_stream

DRAWS = 4000
sizes = st.lists(st.integers(1, 40), max_size=6)
keeps = st.floats(1e-6, 1.0)


def average(masks: list[np.ndarray]) -> np.ndarray:
    return np.mean(masks, axis=0)


def test_the_default_draw_is_in_blocks_everywhere() -> None:
    net, rng = elastic(digits_cnn(), torch.zeros(1, 1, 28, 28)), rng_stream(0, "default")
    for _ in range(20):
        assert all(count % 4 == 0 for count in net.draw(0.4, rng).counts)
    rate = 0.9  # a block is more than a tenth of the filters
    assert net.macs(rate) == net.macs(rate, sampling="blocks") > net.macs(rate, sampling="rounded")
    activations = [net.count_activations(rate, sampling=s) for s in ("blocks", "rounded")]
    assert net.count_activations(rate) == activations[0] > activations[1]
    table = uniform_table(net, rows=3, highest_rate=rate)
    assert table.shares[0] == net.macs(rate, training=True) / net.macs(0.0, training=True)


def test_bernoulli_sampling_keeps_each_filter_equally_often() -> None:
    rng, keep = rng_stream(0, "coins"), np.array([0.3, 0.8])
    samples = [subnets.sample_bernoulli_masks((5, 20), keep, rng) for _ in range(DRAWS)]
    # a site that would lose all filters keeps one: 0.7^5 / 5 more for each
    error = 4 * 0.5 / DRAWS**0.5
    assert average([masks[0] for masks in samples]) == pytest.approx(0.3 + 0.7**5 / 5, abs=error)
    assert average([masks[1] for masks in samples]) == pytest.approx(0.8, abs=error)


def test_bernoulli_samples_are_independent() -> None:
    rng = rng_stream(1, "coins")
    samples = np.array(
        [subnets.sample_bernoulli_masks((20,), np.array([0.5]), rng)[0] for _ in range(DRAWS)]
    )
    correlation = np.corrcoef(samples.T) - np.eye(20)
    assert np.abs(correlation).max() < 4.5 / DRAWS**0.5


@given(sizes, keeps, st.integers(0, 99))
def test_no_site_is_ever_empty(sizes: list[int], keep: float, seed: int) -> None:
    rates, rng = np.full(len(sizes), keep), rng_stream(seed)
    counts = subnets.round_randomly(sizes, rates, "blocks", rng)
    for masks in (
        subnets.sample_bernoulli_masks(sizes, rates, rng),
        subnets.make_prefix_masks(counts, subnets.sample_orders(sizes, rng)),
        subnets.make_prefix_masks(
            subnets.round_up(sizes, rates), subnets.make_rolling_orders(sizes, seed)
        ),
    ):
        assert [len(mask) for mask in masks] == sizes
        assert all(mask.any() for mask in masks)


def test_rounding_has_the_exact_mean() -> None:
    rng, keep = rng_stream(0, "rounded"), np.array([0.35, 0.5, 0.999])
    counts = np.array(
        [subnets.round_randomly((9, 8, 10), keep, "rounded", rng) for _ in range(DRAWS)]
    )
    assert set(counts[:, 0]) == {3, 4}
    assert set(counts[:, 1]) == {4}
    assert counts[:, 0].mean() == pytest.approx(3.15, abs=4 * 0.36 / DRAWS**0.5)
    assert counts[:, 2].mean() == pytest.approx(9.99, abs=4 * 0.1 / DRAWS**0.5)


@pytest.mark.parametrize(("keep", "size"), [(0.7, 10), (0.55, 20), (0.07, 100), (1 - 0.9, 30)])
def test_float_noise_adds_no_filter(keep: float, size: int) -> None:
    expected = round(keep * size)
    assert subnets.round_up((size,), np.array([keep])) == [expected]
    counts = {
        subnets.round_randomly((size,), np.array([keep]), "rounded", rng_stream(n))[0]
        for n in range(50)
    }
    assert counts == {expected}


def test_blocks_are_rounded_to_multiples_of_four_with_an_exact_mean() -> None:
    rng, keep = rng_stream(0, "blocks"), np.array([0.5, 0.6, 0.9, 0.5, 1.0])
    rows = [subnets.round_randomly((12, 20, 18, 8, 16), keep, "blocks", rng) for _ in range(DRAWS)]
    counts = np.array(rows)
    expected = [{4, 8}, {12}, {16, 18}, {4}, {16}]  # 8 filters are too few for blocks
    assert [set(column) for column in counts.T] == expected
    assert counts.mean(0) == pytest.approx([6.0, 12.0, 16.2, 4.0, 16.0], abs=4 * 2 / DRAWS**0.5)


@given(st.integers(1, 512), st.sampled_from([1.0, 0.5, 0.25, 0.125, 0.0625]))
def test_widths_are_those_of_heterofl(size: int, rate: float) -> None:
    assert subnets.round_up((size,), np.array([rate])) == [ceil(size * rate)]


@given(sizes, keeps, keeps, st.integers(0, 9))
def test_narrower_subnets_are_nested_in_wider_ones(
    sizes: list[int], keep_a: float, keep_b: float, seed: int
) -> None:
    order = subnets.sample_orders(sizes, rng_stream(seed))
    low, high = sorted((keep_a, keep_b))
    narrow, wide = (
        subnets.make_prefix_masks(subnets.round_up(sizes, np.full(len(sizes), keep)), order)
        for keep in (low, high)
    )
    assert all((small <= big).all() for small, big in zip(narrow, wide, strict=True))


def test_a_rolling_window_wraps_around() -> None:
    orders = subnets.make_rolling_orders((5, 3), 4)
    assert [order.tolist() for order in orders] == [[4, 0, 1, 2, 3], [1, 2, 0]]
    masks = subnets.make_prefix_masks((2, 2), orders)
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[0, 4], [1, 2]]


def test_a_full_rotation_covers_all_filters_equally_often() -> None:
    windows = [
        subnets.make_prefix_masks((2,), subnets.make_rolling_orders((5,), shift))[0]
        for shift in range(5)
    ]
    assert np.sum(windows, axis=0).tolist() == [2] * 5


def test_random_orders_are_uniform() -> None:
    rng = rng_stream(0, "orders")
    counts = Counter(tuple(subnets.sample_orders((3,), rng)[0].tolist()) for _ in range(6000))
    assert len(counts) == 6
    assert all(abs(count - 1000) < 130 for count in counts.values())


def test_sets_of_one_size_are_equally_likely() -> None:
    rng = rng_stream(0, "drawn")
    samples = [subnets.sample_uniform_masks((4, 1, 2), (2, 1, 1), rng) for _ in range(6000)]
    assert all([int(mask.sum()) for mask in masks] == [2, 1, 1] for masks in samples)
    counts = Counter(tuple(np.flatnonzero(masks[0]).tolist()) for masks in samples)
    assert len(counts) == 6
    assert all(abs(count - 1000) < 130 for count in counts.values())


def count_distribution(size: int, keep: float, sampling: Sampling) -> dict[int, float]:
    """Return the distribution of the number of kept filters, by its definition."""
    if sampling == "bernoulli":
        distribution = {
            n: comb(size, n) * keep**n * (1 - keep) ** (size - n) for n in range(size + 1)
        }
        return {n: p + (distribution[0] if n == 1 else 0) for n, p in distribution.items() if n}
    if sampling == "blocks" and size == 14:  # multiples of four, and all
        low = max(n for n in (0, 4, 8, 12) if n <= size * keep)
        high = min(low + 4, size)
        probability = (size * keep - low) / (high - low)
        low = max(4, low)
        return {low: 1 - probability, high: probability} if low != high else {high: 1.0}
    low = int(size * keep)
    distribution = {max(1, low): 1 - (size * keep - low)}
    distribution[low + 1] = distribution.get(low + 1, 0.0) + size * keep - low
    return distribution


@pytest.mark.parametrize(
    ("sampling", "size"), [("bernoulli", 5), ("rounded", 5), ("blocks", 5), ("blocks", 14)]
)
@pytest.mark.parametrize("keep", [0.05, 0.3, 0.5, 0.8, 1.0])
def test_probabilities_are_sums_over_all_masks(keep: float, sampling: Sampling, size: int) -> None:
    totals = dict.fromkeys(product(range(3), range(3)), 0.0)
    for mask in product([True, False], repeat=size):
        count = sum(mask)
        count_probability = count_distribution(size, keep, sampling).get(count, 0.0)
        for num_kept, num_dropped in totals:
            if all(mask[:num_kept]) and not any(mask[num_kept : num_kept + num_dropped]):
                totals[num_kept, num_dropped] += count_probability / comb(size, count)
    for (num_kept, num_dropped), expected in totals.items():
        probability = subnets.keep_probability(size, keep, sampling, num_kept, num_dropped)
        assert probability == pytest.approx(expected, abs=1e-12), (num_kept, num_dropped)


def test_more_filters_than_exist_cannot_be_kept() -> None:
    assert subnets.keep_probability(1, 0.5, "bernoulli", 2, 0) == 0.0
    assert subnets.keep_probability(1, 0.5, "bernoulli", 1, 0) == 1.0
    assert subnets.keep_probability(1, 0.5, "rounded", 1, 0) == 1.0


def test_a_subnet_counts_its_filters() -> None:
    full_mask = np.ones(3, np.bool_)
    part = Subnet("", (full_mask, np.array([True, False])), (1.0, 1.0))
    assert part.counts == (3, 1)
