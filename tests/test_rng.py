import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.rng import number, stream

parts = st.integers(-(2**70), 2**70) | st.text() | st.text("is1\x1f")
addresses = st.lists(parts, max_size=4).map(tuple)


def draw(seed, *address):
    return stream(seed, *address).integers(2**62, size=4).tolist()


@given(st.integers(), addresses)
def test_the_same_address_gives_the_same_stream(seed, address):
    assert draw(seed, *address) == draw(seed, *address)
    assert number(seed, *address) == number(seed, *address)


@given(st.lists(addresses, min_size=2, max_size=5, unique=True), st.randoms())
def test_the_order_of_asking_does_not_matter(asked, random):
    first = {address: draw(0, *address) for address in asked}
    random.shuffle(asked)
    assert {address: draw(0, *address) for address in asked} == first


@given(addresses, addresses)
def test_different_addresses_give_different_streams(left, right):
    assert (draw(0, *left) == draw(0, *right)) == (left == right)
    assert (number(0, *left) == number(0, *right)) == (left == right)


def test_a_number_and_its_text_are_different_places():
    assert draw(0, 1) != draw(0, "1")
    assert draw(0, 1, 2) != draw(0, 12)
    assert draw(0, "a\x1fsb") != draw(0, "a", "b")


def test_different_seeds_give_different_streams():
    assert draw(0, "dropout") != draw(1, "dropout")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpys_integers_are_integers(kind):
    assert draw(kind(3), kind(7)) == draw(3, 7)


def test_a_fraction_is_no_address():
    with pytest.raises(TypeError, match="float"):
        stream(0, 0.5)


@given(st.integers(), addresses)
def test_a_number_fits_63_bits(seed, address):
    assert 0 <= number(seed, *address) < 2**63


def test_another_process_draws_the_same():
    asked = "from pliant.rng import number; print(number(5, 'order', 2))"
    command = [sys.executable, "-c", asked]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(answer.stdout) == number(5, "order", 2)


def test_streams_are_uniform_over_addresses():
    firsts = np.array([stream(0, "step", step).random() for step in range(2000)])
    counts, _ = np.histogram(firsts, bins=10, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared of 9 degrees, one in a thousand
