"""The binary version of CIFAR-10 and CIFAR-100: records of label bytes and 3072 pixels."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.data.images import check_labels

IMAGE_BYTES = 3 * 32 * 32


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
        # mapped, so that a file takes no memory besides the tensors that it fills
        records = np.memmap(path, np.uint8, "r").reshape(records_per_file, -1)
        if (
            expected_digests
            and (digest := sha256(records.data).hexdigest()) != expected_digests[number]
        ):
            raise ValueError(f"{path}: expected SHA-256 {expected_digests[number]}, got {digest}")
        span = slice(number * records_per_file, (number + 1) * records_per_file)
        labels[span], pixels[span] = records[:, label_bytes - 1], records[:, label_bytes:]
        check_labels(torch.from_numpy(labels[span]), classes, path)
    return torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels)
