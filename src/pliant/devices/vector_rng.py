"""Addressed random numbers for many devices at once: a counter-based generator over numpy arrays.

`rng_stream` takes about 50 µs per address, and a timetable needs hundreds of thousands. So the seed
and the names of an address become a key (`derive_seed`), and its numbers (device, block, draw) the
counter of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011). Nothing is kept between calls.
"""

import numpy as np
from numpy.typing import NDArray

from pliant.rng import Address, derive_seed

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]

MAX_DEVICES = 2**32  # a device number is one word of the counter

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_ROUNDS = 10


def sample_uniforms(
    seed: int,
    address: tuple[Address, ...],
    device: IntArray | int,
    block: IntArray | int = 0,
    draw_index: IntArray | int = 0,
) -> tuple[FloatArray, FloatArray]:
    """Return two uniform numbers in [0, 1) per (device, block, draw); the three broadcast.

    >>> import numpy as np
    >>> from pliant.devices.vector_rng import sample_uniforms
    >>> many, _ = sample_uniforms(0, ("trace",), np.arange(1000))
    >>> alone, _ = sample_uniforms(0, ("trace",), 17)
    >>> bool(many[17] == alone)
    True
    """
    a, b, c, d = philox(
        derive_seed(seed, *address), _to_word(device), _to_word(block), _to_word(draw_index)
    )
    return _to_unit_interval(a, b), _to_unit_interval(c, d)


def philox(key: int, *counter: NDArray[np.uint64]) -> Words:
    """Return four random 32-bit words per counter of up to four 32-bit words."""
    words = np.zeros((4, *np.broadcast_shapes(*(word.shape for word in counter))), np.uint64)
    for index, word in enumerate(counter):
        words[index] = word
    even, odd = words[0::2], words[1::2]
    pair = (2,) + (1,) * (words.ndim - 1)
    keys = np.array([key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF], np.uint64).reshape(pair)
    multipliers, steps = _MULTIPLIERS.reshape(pair), _KEY_STEPS.reshape(pair)
    for _ in range(_ROUNDS):
        crossed = (even * multipliers)[::-1]
        even, odd = (crossed >> _HALF) ^ odd ^ keys, crossed & _LOW
        keys = (keys + steps) & _LOW
    return even[0], odd[0], even[1], odd[1]


def _to_word(value: IntArray | int) -> NDArray[np.uint64]:
    # a negative block (time before zero) keeps its low 32 bits
    return np.asarray(value, np.int64).astype(np.uint64) & _LOW


def _to_unit_interval(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> FloatArray:
    bits = (high << _HALF | low) >> np.uint64(11)
    return np.asarray(bits * 2.0**-53, np.float64)
