import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.rng import derive_seed, rng_stream

parts = st.integers(-(2**70), 2**70) | st.text() | st.text("is1\x1f")
addresses = st.lists(parts, max_size=4).map(tuple)


def draw(seed, *address):
    return rng_stream(seed, *address).integers(2**62, size=4).tolist()


@given(st.integers(), addresses)
def test_the_same_address_gives_the_same_stream(seed, address):
    assert draw(seed, *address) == draw(seed, *address)
    assert derive_seed(seed, *address) == derive_seed(seed, *address)


@given(st.lists(addresses, min_size=2, max_size=5, unique=True), st.randoms())
def test_the_order_of_calls_does_not_matter(addresses, random):
    first = {address: draw(0, *address) for address in addresses}
    random.shuffle(addresses)
    assert {address: draw(0, *address) for address in addresses} == first


@given(addresses, addresses)
def test_different_addresses_give_different_streams(left, right):
    assert (draw(0, *left) == draw(0, *right)) == (left == right)
    assert (derive_seed(0, *left) == derive_seed(0, *right)) == (left == right)


def test_a_number_and_its_text_are_different_addresses():
    assert draw(0, 1) != draw(0, "1")
    assert draw(0, 1, 2) != draw(0, 12)
    assert draw(0, "a\x1fsb") != draw(0, "a", "b")


def test_different_seeds_give_different_streams():
    assert draw(0, "dropout") != draw(1, "dropout")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_integers(kind):
    assert draw(kind(3), kind(7)) == draw(3, 7)


def test_a_float_is_not_an_address():
    with pytest.raises(TypeError, match="float"):
        rng_stream(0, 0.5)


@given(st.integers(), addresses)
def test_a_seed_fits_63_bits(seed, address):
    assert 0 <= derive_seed(seed, *address) < 2**63


def test_another_process_draws_the_same():
    code = "from pliant.rng import derive_seed; print(derive_seed(5, 'order', 2))"
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(process.stdout) == derive_seed(5, "order", 2)


def test_streams_are_uniform_over_addresses():
    firsts = np.array([rng_stream(0, "step", step).random() for step in range(2000)])
    counts, _ = np.histogram(firsts, bins=10, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared of 9 degrees, one in a thousand
