"""Checkpoints: tensors and a small state in one file that loads completely or not at all.

Layout: 7 bytes of magic, one byte with the format number, 32 bytes of SHA-256 of that number and
the body, then the body: safetensors whose metadata carries the state as JSON.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from pliant.storage import atomic, formats

MAGIC = b"PLIANT\x00"
DIGEST_START = len(MAGIC) + 1
HEADER_SIZE = DIGEST_START + sha256().digest_size


class CorruptCheckpoint(ValueError):
    """A checkpoint file is truncated, altered, or not a checkpoint."""


def to_bytes(tensors: Mapping[str, Tensor], state: Any) -> bytes:
    """Encode tensors and a plain state."""
    # Clone, because safetensors refuses tensors that share memory (tied weights).
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    body = safetensors.torch.save(copies, {"state": msgspec.json.encode(state).decode()})
    number = bytes([formats.CHECKPOINT.number])
    return MAGIC + number + sha256(number + body).digest() + body


def from_bytes(raw: bytes, name: str = "checkpoint") -> tuple[dict[str, Tensor], Any]:
    """Decode the bytes of `to_bytes`; raise `CorruptCheckpoint` or `UnsupportedFormat`."""
    if len(raw) < HEADER_SIZE:
        raise CorruptCheckpoint(f"{name}: expected at least {HEADER_SIZE} bytes, got {len(raw)}")
    if raw[: len(MAGIC)] != MAGIC:
        raise CorruptCheckpoint(f"{name}: expected a pliant checkpoint, got other bytes")
    number, body = raw[len(MAGIC) : DIGEST_START], raw[HEADER_SIZE:]
    covered = body if number == b"\x01" else number + body  # format 1 left its number out
    if sha256(covered).digest() != raw[DIGEST_START:HEADER_SIZE]:
        raise CorruptCheckpoint(f"{name}: contents do not match their SHA-256")
    formats.CHECKPOINT.check(number[0], name)
    size = int.from_bytes(body[:8], "little")
    metadata = msgspec.json.decode(body[8 : 8 + size])["__metadata__"]
    return safetensors.torch.load(body), msgspec.json.decode(metadata["state"])


def save(folder: Path, generation: int, tensors: Mapping[str, Tensor], state: Any) -> Path:
    """Write a generation, keep the one before it, and delete all others.

    Newer ones are deleted too: they belong to a run that was resumed from an older checkpoint.
    """
    for leftover in folder.glob(".*.ckpt.*.tmp"):  # of a killed process
        leftover.unlink(missing_ok=True)
    path = folder / f"{generation:08d}.ckpt"
    atomic.write_bytes(path, to_bytes(tensors, state))
    generations = _list_generations(folder)
    keep = [path for path in generations if int(path.stem) <= generation][:2]
    for other in generations:
        if other not in keep:
            other.unlink(missing_ok=True)
    return path


def load(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read one checkpoint file."""
    return from_bytes(path.read_bytes(), str(path))


def load_newest(folder: Path) -> tuple[int, dict[str, Tensor], Any] | None:
    """Read the newest intact generation; None if there is no checkpoint at all."""
    damage: list[str] = []
    for path in _list_generations(folder):
        try:
            tensors, state = load(path)
        except CorruptCheckpoint as error:
            damage.append(str(error))
        else:
            return int(path.stem), tensors, state
    if damage:
        raise CorruptCheckpoint("no intact checkpoint is left: " + "; ".join(damage))
    return None


def _list_generations(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("*.ckpt") if path.stem.isdigit()]
    return sorted(files, key=lambda path: int(path.stem), reverse=True)
