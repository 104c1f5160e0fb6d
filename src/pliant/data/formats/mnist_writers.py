"""The writer of each MNIST image, so that devices can be real people.

Read from `writer_ids.npz` (train_writer, test_writer) or from QMNIST's label tables (Yadav and
Bottou, "Cold Case: The Lost MNIST Digits", 2019), https://github.com/facebookresearch/qmnist.
"""

from pathlib import Path
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
import torch
from torch import Tensor

from pliant.data.download.cache import find_file
from pliant.data.formats.idx import read_idx

Writers = tuple[Tensor | None, Tensor | None]


def read_writers(root: Path, train_labels: Tensor, test_labels: Tensor) -> Writers:
    """Return the writer of each training and test image, or None without a file."""
    npz_path = find_file(root, "mnist", "writer_ids.npz")
    if npz_path is not None:
        return _read_npz(npz_path, len(train_labels), len(test_labels))
    return (
        _read_qmnist(find_file(root, "mnist", "qmnist-train-labels-idx2-int"), train_labels),
        _read_qmnist(find_file(root, "mnist", "qmnist-test-labels-idx2-int"), test_labels),
    )


def _read_npz(path: Path, num_train: int, num_test: int) -> Writers:
    parts = []
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            for name, count in (("train_writer", num_train), ("test_writer", num_test)):
                writers = arrays[name]
                if writers.shape != (count,) or writers.dtype.kind not in "iu":
                    raise ValueError(f"{count} integers as {name}, got {writers.shape}")
                parts.append(torch.from_numpy(writers.astype(np.int64)))
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, ZlibError) as error:
        raise ValueError(f"{path}: expected arrays of writers: {error}") from None
    return parts[0], parts[1]


def _read_qmnist(path: Path | None, labels: Tensor) -> Tensor | None:
    if path is None:
        return None
    table = read_idx(path)
    # the test table is longer than the 10,000 images of MNIST
    if table.ndim != 2 or len(table) < len(labels) or table.shape[1] < 3:
        raise ValueError(
            f"{path}: expected a table of at least {len(labels)} rows, got {tuple(table.shape)}"
        )
    table = table[: len(labels)].to(torch.int64)
    if not torch.equal(table[:, 0], labels):
        raise ValueError(f"{path}: expected the labels of MNIST in column 0, got others")
    return table[:, 2].clone()
