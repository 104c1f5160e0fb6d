"""The algebra of channels, on rows that one can write down."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.nn import channels
from pliant.nn.channels import AllOf, AnyOf, Drawn, Expression, Piece

A, B, C = Drawn(0), Drawn(1), Drawn(2)
SIZES = (4, 4, 3)
MASKS = [
    np.array([True, False, True, False]),
    np.array([False, False, True, True]),
    np.array([True, True, False]),
]


def row(*pieces: Piece) -> list[int]:
    return channels.kept(pieces, MASKS).tolist()


def test_joined_channels_are_counted_on() -> None:
    pieces = (Piece(4, A), Piece(2), Piece(3, C))
    assert channels.width(pieces) == 9
    assert row(*pieces) == [0, 2, 4, 5, 6, 7]
    assert channels.count(pieces, MASKS) == 6


def test_a_flattened_channel_stands_for_its_pixels() -> None:
    assert row(Piece(4, A, repeat=2), Piece(1)) == [0, 1, 4, 5, 8]


def test_unions_and_intersections() -> None:
    assert row(Piece(4, channels.either(A, B))) == [0, 2, 3]
    assert row(Piece(4, channels.both(A, B))) == [2]
    assert channels.either(A, None) is None
    assert channels.both(A, None) == A
    assert channels.either(A, A) == A
    assert channels.either(channels.either(A, B), C) == AnyOf(frozenset({A, B, C}))


def test_a_part_remembers_where_it_began() -> None:
    pieces = (Piece(4, A), Piece(3, C))
    assert channels.part_of(pieces, 2, 5) == (Piece(2, Drawn(0, 2)), Piece(1, C))
    assert channels.part_of((Piece(4, A, repeat=2),), 2, 6) == (Piece(2, Drawn(0, 1), 2),)
    assert channels.part_of((Piece(4, A, repeat=2),), 1, 6) is None
    assert channels.shifted(AnyOf(frozenset({A, B})), 2) == AnyOf(
        frozenset({Drawn(0, 2), Drawn(1, 2)})
    )


def test_pieces_are_cut_where_the_other_ends() -> None:
    pairs = channels.aligned((Piece(4, A), Piece(3, C)), (Piece(3), Piece(4, B)))
    assert pairs == [
        (Piece(3, A), Piece(3)),
        (Piece(1, Drawn(0, 3)), Piece(1, B)),
        (Piece(3, C), Piece(3, Drawn(1, 1))),
    ]
    assert channels.aligned((Piece(4, A),), (Piece(3),)) is None


def test_factors_are_one_number_where_all_are_equal() -> None:
    scales = (2.0, 4.0, 2.0)
    one, other = Piece(4, A, pending=frozenset({0})), Piece(4, B, pending=frozenset({1}))
    alike = Piece(3, C, pending=frozenset({2}))
    assert channels.factors((one, alike), MASKS, scales) == 2.0
    both = channels.factors((one, other, Piece(1)), MASKS, scales)
    assert isinstance(both, np.ndarray)
    assert both.tolist() == [2.0, 2.0, 4.0, 4.0, 1.0]


def test_an_emptied_value_gets_its_first_channel_back() -> None:
    masks = [mask.copy() for mask in MASKS]
    pieces = (Piece(1, Drawn(0, 1)), Piece(1, AllOf(frozenset({Drawn(0, 3), Drawn(1, 0)}))))
    channels.mend(pieces, masks)
    assert channels.count(pieces, masks) == 1
    assert masks[0].tolist() == [True, True, True, False]
    channels.mend(pieces, masks)
    assert masks[0].tolist() == [True, True, True, False], "what is not empty is left alone"


def test_whole_sites_and_what_is_always_there_are_safe() -> None:
    assert channels.is_safe(Piece(4, A), SIZES)
    assert channels.is_safe(Piece(4), SIZES)
    assert channels.is_safe(Piece(4, channels.either(A, B)), SIZES)
    assert not channels.is_safe(Piece(2, A), SIZES)
    assert not channels.is_safe(Piece(4, channels.both(A, B)), SIZES)


filters = st.builds(Drawn, st.integers(0, 2), st.integers(0, 2))
expressions = st.recursive(
    filters,
    lambda inner: st.builds(
        lambda kind, parts: kind(frozenset(parts)) if len(set(parts)) > 1 else parts[0],
        st.sampled_from([AnyOf, AllOf]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=6,
)


def there(expression: Expression, kept: dict[Drawn, bool]) -> bool:
    if expression is None:
        return True
    if isinstance(expression, Drawn):
        return kept[expression]
    ask = any if isinstance(expression, AnyOf) else all
    return ask(there(part, kept) for part in expression.parts)


@given(expressions, st.lists(st.floats(0.1, 1), min_size=3, max_size=3))
def test_the_chance_of_a_channel_is_the_sum_over_all_draws(
    expression: Expression, keep: list[float]
) -> None:
    places = [Drawn(site, start) for site in range(3) for start in range(3)]
    wanted = 0.0
    for row in product([True, False], repeat=9):
        kept = dict(zip(places, row, strict=True))
        if there(expression, kept):
            wanted += prod(keep[f.site] if kept[f] else 1 - keep[f.site] for f in places)

    def coins(site: int, kept: int, dropped: int) -> float:
        return keep[site] ** kept * (1 - keep[site]) ** dropped

    assert channels.probability(expression, coins, {}) == pytest.approx(wanted, abs=1e-12)


def test_two_filters_of_one_site_are_two_coins() -> None:
    def coins(site: int, kept: int, dropped: int) -> float:
        return 0.5 ** (kept + dropped)

    assert channels.probability(channels.either(Drawn(0, 0), Drawn(0, 2)), coins, {}) == 0.75
