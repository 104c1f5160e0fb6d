"""The idx files of MNIST and its kin, plain or gzipped: a magic number, sizes, then bytes."""

import gzip
import zlib
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# the third byte of the magic number: what one item is (big-endian on disk)
KINDS = {0x08: (">u1", torch.uint8), 0x0C: (">i4", torch.int32)}


def read_idx(path: Path, *, pin: str | None = None) -> Tensor:
    """Read one idx file, gzipped or not; `pin` is the SHA-256 that its plain content must have."""
    return parse_idx(plain_bytes(path, pin=pin), path)


def plain_bytes(path: Path, *, pin: str | None = None) -> bytes:
    """Read a file, unpacked if it is gzipped, and check its content against a SHA-256."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a whole gzip file, got {error}") from None
    if pin is not None and (found := sha256(raw).hexdigest()) != pin:
        raise ValueError(f"{path}: expected contents of SHA-256 {pin}, got {found}")
    return raw


def parse_idx(raw: bytes, where: object) -> Tensor:
    """Turn the bytes of an idx file into a tensor."""
    if len(raw) < 4 or raw[:2] != b"\x00\x00" or raw[2] not in KINDS or raw[3] == 0:
        raise ValueError(
            f"{where}: expected an idx magic number (00 00 08 or 0c, then dimensions), "
            f"got {raw[:4].hex(' ') or 'nothing'}"
        )
    disk, kind = KINDS[raw[2]]
    head = 4 + 4 * raw[3]
    if len(raw) < head:
        raise ValueError(f"{where}: expected a head of {head} bytes, got {len(raw)} bytes in all")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", count=raw[3], offset=4))
    wanted = head + prod(shape) * np.dtype(disk).itemsize
    if len(raw) != wanted:
        raise ValueError(f"{where}: expected {wanted} bytes for shape {shape}, got {len(raw)}")
    items = np.frombuffer(raw, disk, offset=head).reshape(shape)
    return torch.from_numpy(items.astype(items.dtype.newbyteorder("="))).to(kind)


def to_idx(items: Tensor) -> bytes:
    """Encode a uint8 tensor as an idx file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in items.shape)
    return bytes([0, 0, 0x08, items.ndim]) + sizes + items.contiguous().numpy().tobytes()


def images_and_labels(images: Tensor, labels: Tensor, where: object) -> tuple[Tensor, Tensor]:
    """Check that an idx pair belongs together; return (n, 1, h, w) bytes and int64 labels."""
    if images.ndim != 3 or images.dtype != torch.uint8:
        raise ValueError(f"{where}: expected images (n, h, w) of bytes, got {tuple(images.shape)}")
    if labels.ndim != 1 or len(labels) != len(images):
        raise ValueError(
            f"{where}: expected {len(images)} labels, one an image, got {tuple(labels.shape)}"
        )
    return images.unsqueeze(1), labels.to(torch.int64)
