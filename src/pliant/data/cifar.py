"""The binary version of CIFAR-10 and CIFAR-100: records of label bytes and 3072 pixels."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.data.images import check_labels

PIXELS = 3 * 32 * 32
BLOCK = 1000  # records read at once: 3 MB beside the tensor that is filled


def read_cifar(
    paths: Sequence[Path],
    *,
    classes: int,
    label_bytes: int,
    records: int,
    pins: Sequence[str | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Read files of `records` records each straight into one tensor.

    The last label byte counts: CIFAR-100 writes the coarse label first, then the fine one. `pins`
    are the SHA-256 of the files.
    """
    record = label_bytes + PIXELS
    for path in paths:
        if (size := path.stat().st_size) != records * record:
            raise ValueError(f"{path}: expected {records * record} bytes, got {size}")
    pixels = np.empty((len(paths) * records, PIXELS), np.uint8)
    labels = np.empty(len(paths) * records, np.int64)
    for number, path in enumerate(paths):
        span = slice(number * records, (number + 1) * records)
        digest = _fill(path, pixels[span], labels[span], label_bytes)
        pin = pins[number] if pins else None
        if pin is not None and digest != pin:
            raise ValueError(f"{path}: expected contents of SHA-256 {pin}, got {digest}")
        check_labels(torch.from_numpy(labels[span]), classes, path)
    return torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels)


def _fill(
    path: Path,
    pixels: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    labels: np.ndarray[tuple[int], np.dtype[np.int64]],
    label_bytes: int,
) -> str:
    found = sha256()
    record = label_bytes + PIXELS
    with open(path, "rb") as file:
        for start in range(0, len(labels), BLOCK):
            count = min(BLOCK, len(labels) - start)
            raw = file.read(count * record)
            if len(raw) != count * record:
                raise ValueError(f"{path}: expected {len(labels)} records, got a shorter file")
            found.update(raw)
            block = np.frombuffer(raw, np.uint8).reshape(count, record)
            labels[start : start + count] = block[:, label_bytes - 1]
            pixels[start : start + count] = block[:, label_bytes:]
    return found.hexdigest()
