"""The binary version of CIFAR-10 and CIFAR-100: records of label bytes and 3072 pixels."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.data.images import check_labels

IMAGE_BYTES = 3 * 32 * 32
RECORDS_PER_READ = 1000  # 3 MB of memory besides the tensor that is filled


def read_cifar(
    paths: Sequence[Path],
    *,
    classes: int,
    label_bytes: int,
    records_per_file: int,
    expected_digests: Sequence[str] = (),
) -> tuple[Tensor, Tensor]:
    """Read files of `records_per_file` records each into one tensor.

    The last label byte is used: CIFAR-100 has the coarse label first, then the fine one.
    `expected_digests` are the SHA-256 of the files.
    """
    file_bytes = records_per_file * (label_bytes + IMAGE_BYTES)
    for path in paths:
        if (size := path.stat().st_size) != file_bytes:
            raise ValueError(f"{path}: expected {file_bytes} bytes, got {size}")
    pixels = np.empty((len(paths) * records_per_file, IMAGE_BYTES), np.uint8)
    labels = np.empty(len(paths) * records_per_file, np.int64)
    for number, path in enumerate(paths):
        span = slice(number * records_per_file, (number + 1) * records_per_file)
        digest = _read_records(path, pixels[span], labels[span], label_bytes)
        if expected_digests and digest != expected_digests[number]:
            raise ValueError(f"{path}: expected SHA-256 {expected_digests[number]}, got {digest}")
        check_labels(torch.from_numpy(labels[span]), classes, path)
    return torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels)


def _read_records(
    path: Path,
    pixels: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    labels: np.ndarray[tuple[int], np.dtype[np.int64]],
    label_bytes: int,
) -> str:
    hasher = sha256()
    record_bytes = label_bytes + IMAGE_BYTES
    with open(path, "rb") as file:
        for start in range(0, len(labels), RECORDS_PER_READ):
            count = min(RECORDS_PER_READ, len(labels) - start)
            raw = file.read(count * record_bytes)
            if len(raw) != count * record_bytes:
                raise ValueError(f"{path}: expected {len(labels)} records, got a shorter file")
            hasher.update(raw)
            block = np.frombuffer(raw, np.uint8).reshape(count, record_bytes)
            labels[start : start + count] = block[:, label_bytes - 1]
            pixels[start : start + count] = block[:, label_bytes:]
    return hasher.hexdigest()
