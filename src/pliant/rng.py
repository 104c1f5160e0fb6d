"""Randomness by address: each address has its own generator, whatever the order of calls."""

from collections.abc import Iterable
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


def sample_stream_uniforms(
    seed: int, *address: Address, numbers: Iterable[int], size: int
) -> NDArray[np.float64]:
    """Return the first `size` uniform numbers of the stream at (*address, n) for each number n.

    The same as `rng_stream(seed, *address, n).random(size)`, several times faster: one generator is
    moved from key to key.

    >>> from pliant.rng import rng_stream, sample_stream_uniforms
    >>> many = sample_stream_uniforms(0, "dropout", 3, numbers=range(100), size=5)
    >>> bool((many[17] == rng_stream(0, "dropout", 3, 17).random(5)).all())
    True
    """
    prefix = blake2b(f"{_join_parts((seed, *address))}\x1fi".encode(), digest_size=16)
    keys = []
    for number in numbers:
        hasher = prefix.copy()
        hasher.update(str(number).encode())
        keys.append(hasher.digest())
    philox = np.random.Philox(_Key(bytes(16)))  # type: ignore[arg-type] # as above
    generator, state = np.random.Generator(philox), philox.state
    uniforms = np.empty((len(keys), size))
    key_words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
    for row, key in zip(uniforms, key_words, strict=True):
        state["state"]["key"] = key
        philox.state = state
        generator.random(out=row)
    return uniforms


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
    return blake2b(_join_parts((seed, *address)).encode(), digest_size=16).digest()


def _join_parts(parts: tuple[Address, ...]) -> str:
    return "\x1f".join(map(_encode_part, parts))


def _encode_part(part: Address) -> str:
    # The type prefix keeps 1 and "1" apart; doubling the separator keeps ("a\x1fsb",) and
    # ("a", "b") apart. `index` takes numpy integers and refuses floats.
    if isinstance(part, str):
        return "s" + part.replace("\x1f", "\x1f\x1f")
    return f"i{index(part)}"
