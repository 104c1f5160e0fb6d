import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices.vector_rng import philox, sample_uniforms

# test vectors that Salmon et al. publish with Random123 (philox4x32, 10 rounds)
TEST_VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def parse_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), TEST_VECTORS)
def test_the_generator_matches_the_published_test_vectors(counter, key, expected):
    low, high = parse_words(key)
    counters = [np.array([word], np.uint64) for word in parse_words(counter)]
    assert [int(word[0]) for word in philox(high << 32 | low, *counters)] == parse_words(expected)


@given(
    seed=st.integers(0, 2**40),
    devices=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    block=st.integers(-(2**20), 2**20),
    draw=st.integers(0, 30),
)
def test_a_draw_does_not_depend_on_other_devices(seed, devices, block, draw):
    together = sample_uniforms(seed, ("law",), np.array(devices), block, draw)
    for index, device in enumerate(devices):
        alone = sample_uniforms(seed, ("law",), device, block, draw)
        assert (together[0][index], together[1][index]) == (alone[0], alone[1])


def test_neighbouring_addresses_differ_and_are_uniform():
    first, second = sample_uniforms(0, ("law",), np.arange(20_000))
    third, _ = sample_uniforms(0, ("law",), np.arange(20_000), 1)
    other, _ = sample_uniforms(0, ("other",), np.arange(20_000))
    for sample in (first, second, third, other):
        assert 0 <= sample.min() < 0.001 < 0.999 < sample.max() < 1
        assert np.bincount((sample * 10).astype(int), minlength=10) == pytest.approx(2000, abs=200)
    for a, b in [(first, second), (first, third), (first, other), (first[1:], first[:-1])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
