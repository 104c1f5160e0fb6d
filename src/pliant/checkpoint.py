"""Checkpoints: tensors and a small state in one file that loads whole or not at all.

File: 8 bytes of name and version, 32 bytes of SHA-256 of all that follows, then a safetensors body
whose metadata carries the state as JSON.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from pliant import atomic

MAGIC = b"PLIANT\x00\x01"
HEAD = len(MAGIC) + sha256().digest_size


class CorruptCheckpoint(ValueError):
    """A checkpoint file is cut, changed, or not a checkpoint."""


def to_bytes(tensors: Mapping[str, Tensor], state: Any) -> bytes:
    """Encode tensors and a plain state."""
    # copies, because safetensors refuses tensors that share memory (tied weights)
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    body = safetensors.torch.save(plain, {"state": msgspec.json.encode(state).decode()})
    return MAGIC + sha256(body).digest() + body


def from_bytes(raw: bytes, name: str = "checkpoint") -> tuple[dict[str, Tensor], Any]:
    """Decode what `to_bytes` made, or raise `CorruptCheckpoint` with what was expected."""
    if len(raw) < HEAD:
        raise CorruptCheckpoint(f"{name}: expected at least {HEAD} bytes, got {len(raw)}")
    if raw[: len(MAGIC)] != MAGIC:
        raise CorruptCheckpoint(f"{name}: expected a pliant checkpoint (it begins otherwise)")
    body = raw[HEAD:]
    if sha256(body).digest() != raw[len(MAGIC) : HEAD]:
        raise CorruptCheckpoint(f"{name}: contents do not match their SHA-256")
    size = int.from_bytes(body[:8], "little")
    metadata = msgspec.json.decode(body[8 : 8 + size])["__metadata__"]
    return safetensors.torch.load(body), msgspec.json.decode(metadata["state"])


def save(folder: Path, number: int, tensors: Mapping[str, Tensor], state: Any) -> Path:
    """Write generation `number`, keep the one before it, and drop all others.

    A newer one is dropped too: it belongs to a future that a resume from an older one has left.
    """
    for torn in folder.glob(".*.ckpt.*.tmp"):  # left by a kill
        torn.unlink(missing_ok=True)
    path = folder / f"{number:08d}.ckpt"
    atomic.write_bytes(path, to_bytes(tensors, state))
    generations = _generations(folder)
    keep = [found for found in generations if int(found.stem) <= number][:2]
    for other in generations:
        if other not in keep:
            other.unlink(missing_ok=True)
    return path


def load(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read one checkpoint file."""
    return from_bytes(path.read_bytes(), str(path))


def newest(folder: Path) -> tuple[int, dict[str, Tensor], Any] | None:
    """Read the newest generation that is whole; None where there is no checkpoint at all."""
    damage: list[str] = []
    for path in _generations(folder):
        try:
            tensors, state = load(path)
        except CorruptCheckpoint as error:
            damage.append(str(error))
        else:
            return int(path.stem), tensors, state
    if damage:
        raise CorruptCheckpoint("no whole checkpoint is left: " + "; ".join(damage))
    return None


def _generations(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("*.ckpt") if path.stem.isdigit()]
    return sorted(files, key=lambda path: int(path.stem), reverse=True)
