import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.value import Count, Fraction, NonNegative, Value, decode, describe_difference, encode


class Spring(Value, frozen=True, tag="spring"):
    mu: NonNegative = 0.01


class Cut(Value, frozen=True, tag="cut"):
    layer: Count = 1
    rates: tuple[Fraction, ...] = ()


class Run(Value, frozen=True):
    method: Spring | Cut = Spring()
    name: str | None = None


def test_a_wrong_number_is_refused_in_python_and_in_plain_data():
    with pytest.raises(ValueError, match=r"Expected `float` >= 0.0 - at `\$.mu` of Spring, got -1"):
        Spring(mu=-1.0)
    with pytest.raises(ValueError, match=r"Expected `float` >= 0.0 at `mu`, got -1"):
        decode({"type": "spring", "mu": -1.0}, Spring)


def test_nan_is_refused():
    with pytest.raises(ValueError, match=r"Expected `float` >= 0\.0"):
        Spring(mu=math.nan)


class Weights(Value, frozen=True):
    by_name: dict[str, float]
    pairs: tuple[tuple[float, float], ...] = ()


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"by_name": {"a": math.inf}}, r"\$\.by_name\[a\]"),
        ({"by_name": {}, "pairs": ((0.0, 1.0), (2.0, -math.inf))}, r"\$\.pairs\[1\]\[1\]"),
        ({"by_name": {}, "pairs": ((0.0, math.nan),)}, r"\$\.pairs\[0\]\[1\]"),
    ],
)
def test_an_infinite_number_inside_a_field_is_refused(fields, place):
    with pytest.raises(ValueError, match=f"Expected a finite number - at `{place}` of Weights"):
        Weights(**fields)
    with pytest.raises(ValueError, match="Expected a finite number"):
        decode(fields, Weights)


def test_the_difference_of_plain_data_is_named_by_its_key():
    old = {"seed": 0, "rules": {"late": "wait", "grace": 0.1}, "only": 1}
    assert describe_difference(old, {"only": 1, **old}) is None
    new = {**old, "rules": {"late": "partial", "grace": 0.1}}
    assert describe_difference(old, new) == 'rules.late = "wait", not "partial"'
    assert describe_difference(old, {**old, "new": None}) == "new = absent, not null"
    long = describe_difference({"rates": [0.5] * 99}, {"rates": []})
    assert long.startswith("rates = [0.5,")
    assert len(long) < 90


@pytest.mark.parametrize("wrong", ["0.1", None, [0.1]])
def test_a_wrong_type_is_refused(wrong):
    with pytest.raises(ValueError, match="Expected `float`, got"):
        Spring(mu=wrong)


def test_a_boolean_is_not_a_count():
    with pytest.raises(ValueError, match="Expected `int`, got `bool`"):
        Cut(layer=True)


def test_the_message_gives_the_path_inside_a_sequence():
    with pytest.raises(ValueError, match=r"at `\$.rates\[1\]` of Cut, got \(0.5, 2.0\)"):
        Cut(rates=(0.5, 2.0))


def test_the_message_gives_the_path_inside_another_value():
    with pytest.raises(ValueError, match=r"Expected `int` >= 1 at `method.layer`"):
        decode({"method": {"type": "cut", "layer": 0}}, Run)


def test_unknown_keys_are_errors():
    with pytest.raises(ValueError, match="unknown key `mew`"):
        decode({"type": "spring", "mew": 0.1}, Spring)


def test_an_unknown_type_is_an_error():
    with pytest.raises(ValueError, match=r"unknown `method.type` = 'sprung'; did you mean"):
        decode({"method": {"type": "sprung"}}, Run)


def test_arguments_are_converted_to_the_declared_types():
    cut = Cut(rates=[0, 1])
    assert cut.rates == (0.0, 1.0)
    assert isinstance(cut.rates[0], float)
    assert isinstance(Spring(mu=1).mu, float)


def test_a_value_cannot_be_changed():
    with pytest.raises(AttributeError):
        Spring().mu = 2.0


def test_equal_values_have_the_same_hash():
    assert len({Run(Cut(3, [0.5])), Run(Cut(3, (0.5,))), Run(Cut(4, (0.5,)))}) == 2


values = st.builds(
    Run,
    method=st.builds(Spring, mu=st.floats(0, 1e300))
    | st.builds(Cut, layer=st.integers(1, 2**63 - 1), rates=st.lists(st.floats(0, 1), max_size=4)),
    name=st.none() | st.text(),
)


@given(values)
def test_a_value_survives_encoding(value):
    assert decode(encode(value), Run) == value
