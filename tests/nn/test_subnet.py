"""Ways to choose filters: how often, how many, which ones."""

from collections import Counter
from itertools import product
from math import ceil, comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.nn import subnet as choices
from pliant.nn.subnet import Choice, Subnet
from pliant.rng import stream

DRAWS = 4000
sizes = st.lists(st.integers(1, 40), max_size=6)
keeps = st.floats(1e-6, 1.0)


def share(masks: list[np.ndarray]) -> np.ndarray:
    return np.mean(masks, axis=0)


def test_coins_keep_each_filter_equally_often() -> None:
    rng, keep = stream(0, "coins"), np.array([0.3, 0.8])
    drawn = [choices.coins((5, 20), keep, rng) for _ in range(DRAWS)]
    # a site that would lose all its filters keeps one of them: 0.7^5 / 5 more for each
    error = 4 * 0.5 / DRAWS**0.5
    assert share([masks[0] for masks in drawn]) == pytest.approx(0.3 + 0.7**5 / 5, abs=error)
    assert share([masks[1] for masks in drawn]) == pytest.approx(0.8, abs=error)


def test_coins_are_independent() -> None:
    rng = stream(1, "coins")
    drawn = np.array([choices.coins((20,), np.array([0.5]), rng)[0] for _ in range(DRAWS)])
    together = np.corrcoef(drawn.T) - np.eye(20)
    assert np.abs(together).max() < 4.5 / DRAWS**0.5


@given(sizes, keeps, st.integers(0, 99))
def test_no_site_is_ever_empty(sizes: list[int], keep: float, seed: int) -> None:
    rates, rng = np.full(len(sizes), keep), stream(seed)
    counts = choices.rounded(sizes, rates, "blocks", rng)
    for masks in (
        choices.coins(sizes, rates, rng),
        choices.first(counts, choices.orders(sizes, rng)),
        choices.first(choices.ceiled(sizes, rates), choices.rolled(sizes, seed)),
    ):
        assert [len(mask) for mask in masks] == sizes
        assert all(mask.any() for mask in masks)


def test_the_mean_of_rounding_is_exact() -> None:
    rng, keep = stream(0, "rounded"), np.array([0.35, 0.5, 0.999])
    counts = np.array([choices.rounded((9, 8, 10), keep, "rounded", rng) for _ in range(DRAWS)])
    assert set(counts[:, 0]) == {3, 4}
    assert set(counts[:, 1]) == {4}
    assert counts[:, 0].mean() == pytest.approx(3.15, abs=4 * 0.36 / DRAWS**0.5)
    assert counts[:, 2].mean() == pytest.approx(9.99, abs=4 * 0.1 / DRAWS**0.5)


@pytest.mark.parametrize(("keep", "size"), [(0.7, 10), (0.55, 20), (0.07, 100), (1 - 0.9, 30)])
def test_float_noise_adds_no_filter(keep: float, size: int) -> None:
    wanted = round(keep * size)
    assert choices.ceiled((size,), np.array([keep])) == [wanted]
    found = {choices.rounded((size,), np.array([keep]), "rounded", stream(n))[0] for n in range(50)}
    assert found == {wanted}


def test_blocks_are_rounded_to_multiples_of_four_with_an_exact_mean() -> None:
    rng, keep = stream(0, "blocks"), np.array([0.5, 0.6, 0.9, 0.5, 1.0])
    rows = [choices.rounded((12, 20, 18, 8, 16), keep, "blocks", rng) for _ in range(DRAWS)]
    counts = np.array(rows)
    wanted = [{4, 8}, {12}, {16, 18}, {4}, {16}]  # 8 filters are too few for blocks
    assert [set(column) for column in counts.T] == wanted
    assert counts.mean(0) == pytest.approx([6.0, 12.0, 16.2, 4.0, 16.0], abs=4 * 2 / DRAWS**0.5)


@given(st.integers(1, 512), st.sampled_from([1.0, 0.5, 0.25, 0.125, 0.0625]))
def test_widths_are_heterofls(size: int, rate: float) -> None:
    assert choices.ceiled((size,), np.array([rate])) == [ceil(size * rate)]


@given(sizes, keeps, keeps, st.integers(0, 9))
def test_narrower_subnets_of_one_order_lie_within_wider_ones(
    sizes: list[int], one: float, other: float, seed: int
) -> None:
    order = choices.orders(sizes, stream(seed))
    low, high = sorted((one, other))
    narrow, wide = (
        choices.first(choices.ceiled(sizes, np.full(len(sizes), keep)), order)
        for keep in (low, high)
    )
    assert all((small <= big).all() for small, big in zip(narrow, wide, strict=True))


def test_a_window_goes_round() -> None:
    order = choices.rolled((5, 3), 4)
    assert [places.tolist() for places in order] == [[4, 0, 1, 2, 3], [1, 2, 0]]
    masks = choices.first((2, 2), order)
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[0, 4], [1, 2]]


def test_a_full_turn_of_the_window_trains_all_filters_equally_often() -> None:
    windows = [choices.first((2,), choices.rolled((5,), shift))[0] for shift in range(5)]
    assert np.sum(windows, axis=0).tolist() == [2] * 5


def test_random_orders_are_uniform() -> None:
    rng = stream(0, "orders")
    found = Counter(tuple(choices.orders((3,), rng)[0].tolist()) for _ in range(6000))
    assert len(found) == 6
    assert all(abs(number - 1000) < 130 for number in found.values())


def test_sets_of_a_given_size_are_equally_likely() -> None:
    rng = stream(0, "drawn")
    drawn = [choices.drawn((4, 1, 2), (2, 1, 1), rng) for _ in range(6000)]
    assert all([int(mask.sum()) for mask in masks] == [2, 1, 1] for masks in drawn)
    found = Counter(tuple(np.flatnonzero(masks[0]).tolist()) for masks in drawn)
    assert len(found) == 6
    assert all(abs(number - 1000) < 130 for number in found.values())


def numbers(size: int, keep: float, choice: Choice) -> dict[int, float]:
    """The distribution of how many filters are kept, by its definition."""
    if choice == "bernoulli":
        found = {n: comb(size, n) * keep**n * (1 - keep) ** (size - n) for n in range(size + 1)}
        return {n: p + (found[0] if n == 1 else 0) for n, p in found.items() if n}
    if choice == "blocks" and size == 14:  # multiples of four, and all
        low = max(n for n in (0, 4, 8, 12) if n <= size * keep)
        high = min(low + 4, size)
        up = (size * keep - low) / (high - low)
        return {max(4, low): 1 - up, high: up} if max(4, low) != high else {high: 1.0}
    low = int(size * keep)
    found = {max(1, low): 1 - (size * keep - low)}
    found[low + 1] = found.get(low + 1, 0.0) + size * keep - low
    return found


@pytest.mark.parametrize(
    ("choice", "size"), [("bernoulli", 5), ("rounded", 5), ("blocks", 5), ("blocks", 14)]
)
@pytest.mark.parametrize("keep", [0.05, 0.3, 0.5, 0.8, 1.0])
def test_chances_are_the_sums_over_all_sets_of_filters(
    keep: float, choice: Choice, size: int
) -> None:
    total = dict.fromkeys(product(range(3), range(3)), 0.0)
    for row in product([True, False], repeat=size):
        number = sum(row)
        likely = numbers(size, keep, choice).get(number, 0.0) / comb(size, number)
        for kept, dropped in total:
            if all(row[:kept]) and not any(row[kept : kept + dropped]):
                total[kept, dropped] += likely
    for (kept, dropped), wanted in total.items():
        found = choices.chance(size, keep, choice, kept, dropped)
        assert found == pytest.approx(wanted, abs=1e-12), (kept, dropped)


def test_more_filters_than_there_are_cannot_be_kept() -> None:
    assert choices.chance(1, 0.5, "bernoulli", 2, 0) == 0.0
    assert choices.chance(1, 0.5, "bernoulli", 1, 0) == 1.0
    assert choices.chance(1, 0.5, "rounded", 1, 0) == 1.0


def test_a_subnet_knows_whether_it_is_the_whole_network() -> None:
    whole = np.ones(3, np.bool_)
    assert Subnet("", (whole, whole), (1.0, 1.0)).is_full
    assert not Subnet("", (whole, whole), (1.0, 2.0)).is_full
    part = Subnet("", (whole, np.array([True, False])), (1.0, 1.0))
    assert not part.is_full
    assert part.counts == (3, 1)
