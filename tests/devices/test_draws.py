import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices.draws import philox, uniforms

# the known answers that Salmon et al. publish with Random123 (philox4x32, 10 rounds)
KNOWN = [
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


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_generator_gives_the_published_answers(counter, key, answer):
    low, high = words(key)
    drawn = philox(high << 32 | low, *[np.array([word], np.uint64) for word in words(counter)])
    assert [int(word[0]) for word in drawn] == words(answer)


@given(
    seed=st.integers(0, 2**40),
    devices=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    block=st.integers(-(2**20), 2**20),
    draw=st.integers(0, 30),
)
def test_a_draw_does_not_depend_on_its_company(seed, devices, block, draw):
    together = uniforms(seed, ("law",), np.array(devices), block, draw)
    for place, device in enumerate(devices):
        alone = uniforms(seed, ("law",), device, block, draw)
        assert (together[0][place], together[1][place]) == (alone[0], alone[1])


def test_neighbouring_addresses_differ_and_are_uniform():
    first, second = uniforms(0, ("law",), np.arange(20_000))
    third, _ = uniforms(0, ("law",), np.arange(20_000), 1)
    other, _ = uniforms(0, ("other",), np.arange(20_000))
    for drawn in (first, second, third, other):
        assert 0 <= drawn.min() < 0.001 < 0.999 < drawn.max() < 1
        assert np.bincount((drawn * 10).astype(int), minlength=10) == pytest.approx(2000, abs=200)
    for a, b in [(first, second), (first, third), (first, other), (first[1:], first[:-1])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
