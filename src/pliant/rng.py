"""Randomness by address: one place gives one generator, in whatever order places are asked for."""

from hashlib import blake2b
from operator import index
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Address = str | int


def stream(seed: int, *address: Address) -> np.random.Generator:
    """Return the generator that lives at this address.

    Nothing is kept between calls, so any round of a run can be replayed alone and a resumed run
    needs no saved state.

    >>> from pliant.rng import stream
    >>> a = stream(0, "dropout", 3, 17).random()
    >>> stream(0, "dropout", 3, 18).random() == a
    False
    >>> stream(0, "dropout", 3, 17).random() == a
    True
    """
    return np.random.Generator(np.random.Philox(_Key(_digest(seed, address))))  # type: ignore[arg-type] # numpy takes any ISeedSequence


def number(seed: int, *address: Address) -> int:
    """Return a 63-bit number for this address: a seed for what takes a seed of its own."""
    return int.from_bytes(_digest(seed, address)[:8], "little") >> 1


class _Key(ISeedSequence):
    """A seed that is a generator's key as it is: `Philox(key=…)` would ask the system for noise."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.frombuffer(self._key, dtype, n_words)


def _digest(seed: int, address: tuple[Address, ...]) -> bytes:
    text = "\x1f".join(_part(part) for part in (seed, *address))
    return blake2b(text.encode(), digest_size=16).digest()


def _part(part: Address) -> str:
    # The type is in the text, so that 1 and "1" are different places; numpy's integers count as
    # integers, floats are refused; a doubled separator cannot be taken for one between two parts.
    if isinstance(part, str):
        return "s" + part.replace("\x1f", "\x1f\x1f")
    return f"i{index(part)}"
