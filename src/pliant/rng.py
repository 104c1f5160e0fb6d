"""Randomness by address: each address has its own generator, whatever the order of calls."""

from hashlib import blake2b
from operator import index
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Address = str | int


def rng_stream(seed: int, *address: Address) -> np.random.Generator:
    """Return the generator at this address.

    No state is kept between calls, so any round of a run can be replayed alone and a resumed run
    needs no saved generators.

    >>> from pliant.rng import rng_stream
    >>> a = rng_stream(0, "dropout", 3, 17).random()
    >>> rng_stream(0, "dropout", 3, 18).random() == a
    False
    >>> rng_stream(0, "dropout", 3, 17).random() == a
    True
    """
    return np.random.Generator(np.random.Philox(_Key(_hash_address(seed, address))))  # type: ignore[arg-type] # numpy takes any ISeedSequence


def derive_seed(seed: int, *address: Address) -> int:
    """Return a 63-bit seed for this address, for libraries that need one."""
    return int.from_bytes(_hash_address(seed, address)[:8], "little") >> 1


class _Key(ISeedSequence):
    """A seed sequence that returns its key unchanged; `Philox(key=…)` would read system entropy."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.frombuffer(self._key, dtype, n_words)


def _hash_address(seed: int, address: tuple[Address, ...]) -> bytes:
    text = "\x1f".join(_encode_part(part) for part in (seed, *address))
    return blake2b(text.encode(), digest_size=16).digest()


def _encode_part(part: Address) -> str:
    # The type prefix keeps 1 and "1" apart; doubling the separator keeps ("a\x1fsb",) and
    # ("a", "b") apart. `index` takes numpy integers and refuses floats.
    if isinstance(part, str):
        return "s" + part.replace("\x1f", "\x1f\x1f")
    return f"i{index(part)}"
