"""Who wrote each MNIST image: real people as devices.

Either `writer_ids.npz` says it (train_writer, test_writer), or the label tables of QMNIST (Yadav
and Bottou, "Cold Case: The Lost MNIST Digits", 2019), https://github.com/facebookresearch/qmnist.
"""

from pathlib import Path
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
import torch
from torch import Tensor

from pliant.data.idx import read_idx
from pliant.data.root import find_file

Writers = tuple[Tensor | None, Tensor | None]


def read_writers(root: Path, train_labels: Tensor, test_labels: Tensor) -> Writers:
    """Return the writer of each training and test image, None where no file says it."""
    packed = find_file(root, "mnist", "writer_ids.npz")
    if packed is not None:
        return _from_npz(packed, len(train_labels), len(test_labels))
    return (
        _from_qmnist(find_file(root, "mnist", "qmnist-train-labels-idx2-int"), train_labels),
        _from_qmnist(find_file(root, "mnist", "qmnist-test-labels-idx2-int"), test_labels),
    )


def _from_npz(path: Path, train: int, test: int) -> Writers:
    found = []
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            for name, count in (("train_writer", train), ("test_writer", test)):
                writers = arrays[name]
                if writers.shape != (count,) or writers.dtype.kind not in "iu":
                    raise ValueError(f"{count} whole numbers as {name}, got {writers.shape}")
                found.append(torch.from_numpy(writers.astype(np.int64)))
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, ZlibError) as error:
        raise ValueError(f"{path}: expected arrays of writers: {error}") from None
    return found[0], found[1]


def _from_qmnist(path: Path | None, labels: Tensor) -> Tensor | None:
    if path is None:
        return None
    table = read_idx(path)
    # its test table goes on beyond the 10,000 images of MNIST
    if table.ndim != 2 or len(table) < len(labels) or table.shape[1] < 3:
        raise ValueError(
            f"{path}: expected a table of at least {len(labels)} rows, got {tuple(table.shape)}"
        )
    table = table[: len(labels)].to(torch.int64)
    if not torch.equal(table[:, 0], labels):
        raise ValueError(f"{path}: expected the classes of MNIST in column 0, got others")
    return table[:, 2].clone()
