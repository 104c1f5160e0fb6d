"""Addressed random numbers for many devices at once: a counter-based generator over numpy arrays.

`pliant.rng.stream` makes one generator for one address, at some 50 µs each; a timetable asks for
hundreds of thousands of addresses. So the seed and the names choose a key by `pliant.rng.number`,
and the numbers of the address (device, block, draw) are the counter of Philox4x32-10 (Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Nothing is kept
between calls.
"""

import numpy as np
from numpy.typing import NDArray

from pliant.rng import Address, number

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]

DEVICES = 2**32  # a device's number is one word of the counter

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_ROUNDS = 10


def uniforms(
    seed: int,
    address: tuple[Address, ...],
    device: IntArray | int,
    block: IntArray | int = 0,
    draw: IntArray | int = 0,
) -> tuple[FloatArray, FloatArray]:
    """Return two uniform numbers in [0, 1) for each (device, block, draw); the three broadcast.

    >>> import numpy as np
    >>> from pliant.devices.draws import uniforms
    >>> many, _ = uniforms(0, ("trace",), np.arange(1000))
    >>> alone, _ = uniforms(0, ("trace",), 17)
    >>> bool(many[17] == alone)
    True
    """
    a, b, c, d = philox(number(seed, *address), _word(device), _word(block), _word(draw))
    return _unit(a, b), _unit(c, d)


def philox(key: int, *counter: NDArray[np.uint64]) -> Words:
    """Return four random 32-bit words for each counter of up to four 32-bit words."""
    words = np.zeros((4, *np.broadcast_shapes(*(word.shape for word in counter))), np.uint64)
    for place, word in enumerate(counter):
        words[place] = word
    even, odd = words[0::2], words[1::2]
    pair = (2,) + (1,) * (words.ndim - 1)
    keys = np.array([key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF], np.uint64).reshape(pair)
    multipliers, steps = _MULTIPLIERS.reshape(pair), _KEY_STEPS.reshape(pair)
    for _ in range(_ROUNDS):
        crossed = (even * multipliers)[::-1]
        even, odd = (crossed >> _HALF) ^ odd ^ keys, crossed & _LOW
        keys = (keys + steps) & _LOW
    return even[0], odd[0], even[1], odd[1]


def _word(value: IntArray | int) -> NDArray[np.uint64]:
    # a negative block (time before zero) keeps its low 32 bits
    return np.asarray(value, np.int64).astype(np.uint64) & _LOW


def _unit(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> FloatArray:
    bits = (high << _HALF | low) >> np.uint64(11)
    return np.asarray(bits * 2.0**-53, np.float64)
