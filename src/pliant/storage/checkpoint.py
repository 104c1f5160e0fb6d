"""Checkpoints: tensors and a small state in one file that loads completely or not at all.

Layout: 7 bytes of magic, one byte with the format number, 32 bytes of SHA-256 of that number and
the body, then the body: safetensors whose metadata carries the state as JSON.

What changes rarely, such as the states of devices, may be in parts: files of the same layout, named
by their contents, which generations share. A generation without one of its parts is damaged.
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
PARTS_FOLDER = "parts"

Parts = Mapping[str, str]  # the prefix of the names of a part's tensors -> its file


class CorruptCheckpoint(ValueError):
    """A checkpoint file is truncated, altered, or not a checkpoint."""


def to_bytes(tensors: Mapping[str, Tensor], state: Any, parts: Parts | None = None) -> bytes:
    """Encode tensors, a plain state and the files of its parts."""
    # Clone, because safetensors refuses tensors that share memory (tied weights).
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    values = {"state": state} | ({"parts": parts} if parts else {})
    metadata = {name: msgspec.json.encode(value).decode() for name, value in values.items()}
    body = safetensors.torch.save(copies, metadata)
    number = bytes([formats.CHECKPOINT.number])
    return MAGIC + number + sha256(number + body).digest() + body


def from_bytes(raw: bytes, name: str = "checkpoint") -> tuple[dict[str, Tensor], Any]:
    """Decode the bytes of `to_bytes` without parts; raise `CorruptCheckpoint` or a format error."""
    tensors, metadata = _decode(raw, name)
    return tensors, msgspec.json.decode(metadata["state"])


def _decode(raw: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if len(raw) < HEADER_SIZE:
        raise CorruptCheckpoint(f"{name}: expected at least {HEADER_SIZE} bytes, got {len(raw)}")
    if raw[: len(MAGIC)] != MAGIC:
        raise CorruptCheckpoint(f"{name}: expected a pliant checkpoint, got other bytes")
    number, body = raw[len(MAGIC) : DIGEST_START], raw[HEADER_SIZE:]
    covered = body if number == b"\x01" else number + body  # format 1 left its number out
    if sha256(covered).digest() != raw[DIGEST_START:HEADER_SIZE]:
        raise CorruptCheckpoint(f"{name}: contents do not match their SHA-256")
    formats.CHECKPOINT.check(number[0], name)
    return safetensors.torch.load(body), _decode_metadata(body[:8], body[8:])


def _decode_metadata(size: bytes, header: bytes) -> dict[str, str]:
    decoded = msgspec.json.decode(header[: int.from_bytes(size, "little")])
    metadata: dict[str, str] = decoded["__metadata__"]
    return metadata


def write_part(
    folder: Path, name: str, tensors: Mapping[str, Tensor], *, is_private: bool = False
) -> str:
    """Write a part, unless there is one with the same contents, and return its file's name."""
    raw = to_bytes(tensors, None)
    file = f"{name}-{_get_digest(raw)}.part"
    if not (folder / PARTS_FOLDER / file).exists():
        atomic.write_bytes(folder / PARTS_FOLDER / file, raw, is_private=is_private)
    return file


def _get_digest(raw: bytes) -> str:
    return raw[DIGEST_START:HEADER_SIZE].hex()


def save(
    folder: Path,
    generation: int,
    tensors: Mapping[str, Tensor],
    state: Any,
    parts: Parts | None = None,
    *,
    is_private: bool = False,
) -> Path:
    """Write a generation, keep the one before it, and delete all others and their parts.

    A private one is for its owner only.
    Newer ones are deleted too: they belong to a run that was resumed from an older checkpoint.
    """
    for leftover in folder.glob(".*.ckpt.*.tmp"):  # of a killed process
        leftover.unlink(missing_ok=True)
    path = folder / f"{generation:08d}.ckpt"
    atomic.write_bytes(path, to_bytes(tensors, state, parts), is_private=is_private)
    generations = _list_generations(folder)
    keep = [path for path in generations if int(path.stem) <= generation][:2]
    for other in generations:
        if other not in keep:
            other.unlink(missing_ok=True)
    _delete_unused_parts(folder, keep)
    return path


def _delete_unused_parts(folder: Path, generations: list[Path]) -> None:
    files = list((folder / PARTS_FOLDER).glob("*"))  # temporary ones of a killed process too
    used = {file for path in generations for file in _read_parts(path).values()} if files else {}
    for file in files:
        if file.name not in used:
            file.unlink(missing_ok=True)


def _read_parts(path: Path) -> Parts:
    """Return the parts of a generation without reading its tensors; none if it is damaged."""
    with path.open("rb") as file:
        file.seek(HEADER_SIZE)
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    try:
        parts: Parts = msgspec.json.decode(_decode_metadata(size, header).get("parts", "{}"))
    except (msgspec.DecodeError, LookupError):
        return {}
    return parts


def load(path: Path, *, with_parts: bool = True) -> tuple[dict[str, Tensor], Any]:
    """Read one checkpoint file and its parts, whose tensors are named by prefix and own name."""
    tensors, metadata = _decode(path.read_bytes(), str(path))
    parts = msgspec.json.decode(metadata.get("parts", "{}"), type=dict[str, str])
    for prefix, file in parts.items() if with_parts else ():
        part = path.parent / PARTS_FOLDER / file
        if not part.exists():
            raise CorruptCheckpoint(f"{part}: expected a part of {path.name}, found none")
        raw = part.read_bytes()
        if not file.endswith(f"-{_get_digest(raw)}.part"):
            raise CorruptCheckpoint(f"{part}: expected contents as in its name, got others")
        for name, tensor in from_bytes(raw, str(part))[0].items():
            tensors[f"{prefix}/{name}"] = tensor
    return tensors, msgspec.json.decode(metadata["state"])


def load_newest(
    folder: Path, *, with_parts: bool = True
) -> tuple[int, dict[str, Tensor], Any] | None:
    """Read the newest intact generation; None if there is no checkpoint at all."""
    damage: list[str] = []
    for path in _list_generations(folder):
        try:
            tensors, state = load(path, with_parts=with_parts)
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
