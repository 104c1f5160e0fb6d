"""Wrong keys and names: where they are and what they were meant to be."""

from typing import Literal

import pytest

from pliant.suggestions import did_you_mean
from pliant.value import Count, Value, decode


class Leaf(Value, frozen=True, tag="leaf"):
    weight: float = 1.0


class Twig(Value, frozen=True, tag="twig"):
    length: Count = 1
    leaves: tuple[Leaf, ...] = ()


class Tree(Value, frozen=True):
    first: Leaf | Twig
    more: tuple[Twig, ...] = ()


class Garden(Value, frozen=True):
    tree: Tree
    order: Literal["rows", "none"] | Leaf = "rows"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "expected a key `first`, found none"),
        ({"first": {}}, "expected a key `first.type`, found none"),
        ({"frist": 1}, "unknown key `frist`; did you mean 'first'? There are first, more"),
        (
            {"first": {"type": "twigg"}},
            "unknown `first.type` = 'twigg'; did you mean 'twig'? There are leaf, twig",
        ),
        (
            {"first": {"type": "twig", "wait": 1}},
            "unknown key `first.wait`; there are leaves, length, type",
        ),
        (
            {"first": {"type": "leaf", "wait": 1}},
            "unknown key `first.wait`; did you mean 'weight'? There are type, weight",
        ),
        (
            {"first": {"type": "leaf"}, "more": [{"type": "twig", "leaves": [{"wigth": 1}]}]},
            "unknown key `more.0.leaves.0.wigth`; did you mean 'weight'? There are type, weight",
        ),
        ({"first": "leaf"}, "Expected a table at `first`, got 'leaf'"),
        ({"first": {"type": "twig", "length": 0}}, "Expected `int` >= 1 at `first.length`, got 0"),
        (
            {"first": {"type": "leaf", "weight": float("nan")}},
            "Expected a finite number at `weight` of Leaf, got nan, in `first`",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_path_and_the_right_names(raw, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        decode(raw, Tree)
    assert str(caught.value) == message


def test_all_keys_that_do_not_fit_are_named_with_those_that_do():
    raw = {"tree": {"first": {"type": "leaf", "length": 2, "leaves": []}, "sort": 1}}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        decode(raw, Garden)
    assert str(caught.value) == (
        "unknown keys `tree.sort`, `tree.first.length`, `tree.first.leaves`; "
        "`tree` has first, more; `tree.first` has type, weight"
    )


def test_words_and_tables_that_may_stand_at_a_key_are_listed():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        decode({"tree": {"first": {"type": "leaf"}}, "order": "row"}, Garden)
    assert str(caught.value) == (
        "unknown `order` = 'row'; did you mean 'rows'? There are none, rows, { type = \"leaf\" }"
    )


def test_no_name_is_guessed_where_none_is_near():
    assert did_you_mean("zzz", ["a", "b"]) == "; there are a, b"
    assert did_you_mean("zzz", []) == ""
