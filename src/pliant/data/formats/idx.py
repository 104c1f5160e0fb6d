"""The idx format of MNIST, plain or gzipped: a magic number, sizes, then items."""

import gzip
import zlib
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# the third byte of the magic number gives the item type (big-endian on disk)
ITEM_TYPES = {0x08: (">u1", torch.uint8), 0x0C: (">i4", torch.int32)}


def read_idx(path: Path, *, expected_digest: str | None = None) -> Tensor:
    """Read a plain or gzipped idx file and check the SHA-256 of its plain content, if given."""
    return parse_idx(read_plain_bytes(path, expected_digest=expected_digest), path)


def read_plain_bytes(path: Path, *, expected_digest: str | None = None) -> bytes:
    """Read a plain or gzipped file and check the SHA-256 of its plain content, if given."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a complete gzip file, got {error}") from None
    if expected_digest is not None and (digest := sha256(raw).hexdigest()) != expected_digest:
        raise ValueError(f"{path}: expected SHA-256 {expected_digest}, got {digest}")
    return raw


def parse_idx(raw: bytes, where: object) -> Tensor:
    if len(raw) < 4 or raw[:2] != b"\x00\x00" or raw[2] not in ITEM_TYPES or raw[3] == 0:
        raise ValueError(
            f"{where}: expected an idx magic number (00 00 08 or 0c, then dimensions), "
            f"got {raw[:4].hex(' ') or 'nothing'}"
        )
    disk_type, dtype = ITEM_TYPES[raw[2]]
    header = 4 + 4 * raw[3]
    if len(raw) < header:
        raise ValueError(f"{where}: expected a header of {header} bytes, got {len(raw)} in total")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", count=raw[3], offset=4))
    expected = header + prod(shape) * np.dtype(disk_type).itemsize
    if len(raw) != expected:
        raise ValueError(f"{where}: expected {expected} bytes for shape {shape}, got {len(raw)}")
    items = np.frombuffer(raw, disk_type, offset=header).reshape(shape)
    return torch.from_numpy(items.astype(items.dtype.newbyteorder("="))).to(dtype)


def encode_idx(items: Tensor) -> bytes:
    """Encode a uint8 tensor as an idx file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in items.shape)
    return bytes([0, 0, 0x08, items.ndim]) + sizes + items.contiguous().numpy().tobytes()


def pair_images_with_labels(images: Tensor, labels: Tensor, where: object) -> tuple[Tensor, Tensor]:
    """Check that images and labels match; return (n, 1, h, w) bytes and int64 labels."""
    if images.ndim != 3 or images.dtype != torch.uint8:
        raise ValueError(f"{where}: expected images (n, h, w) of bytes, got {tuple(images.shape)}")
    if labels.ndim != 1 or len(labels) != len(images):
        raise ValueError(
            f"{where}: expected {len(images)} labels, one per image, got {tuple(labels.shape)}"
        )
    return images.unsqueeze(1), labels.to(torch.int64)
