"""Ten thousand real MNIST digits embedded in the package."""

import lzma
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from torch import Tensor

from pliant.data.download.cache import DatasetStatus
from pliant.data.federated import TrainTestData
from pliant.data.formats.idx import encode_idx, pair_images_with_labels, parse_idx
from pliant.data.images import ImageDataset

FILE_NAME = "digits.idx.xz"
SHA256 = "19bdc258ab1631fbba9d0ff0941ce504d35d264050e18186fcdbaf4a8d313d59"
TRAIN_SIZE, TEST_SIZE = 8_000, 2_000
MEAN, STD = (0.1307,), (0.3081,)  # of the full MNIST training set


def digits(root: Path | None = None) -> TrainTestData:
    """Load the embedded digits, 8,000 for training and 2,000 for testing; `root` is ignored."""
    images, labels = unpack_digits(_embedded_file().read_bytes(), SHA256)
    return TrainTestData(
        train=ImageDataset(images[:TRAIN_SIZE], labels[:TRAIN_SIZE], 10, MEAN, STD, name="digits"),
        test=ImageDataset(images[TRAIN_SIZE:], labels[TRAIN_SIZE:], 10, MEAN, STD, name="digits"),
    )


def inspect_digits() -> DatasetStatus:
    """Check the embedded file against its SHA-256."""
    is_intact = sha256(_embedded_file().read_bytes()).hexdigest() == SHA256
    paths = (str(_embedded_file()),)
    return DatasetStatus(
        name="digits",
        title="MNIST: 10,000 digits, 28x28 grey, inside the package",
        state="complete" if is_intact else "damaged",
        present=paths if is_intact else (),
        damaged=() if is_intact else paths,
    )


def pack_digits(images: Tensor, labels: Tensor) -> bytes:
    """Pack images (n, h, w) and labels, as two consecutive idx files, into one xz stream."""
    return lzma.compress(encode_idx(images) + encode_idx(labels), preset=9 | lzma.PRESET_EXTREME)


def unpack_digits(packed: bytes, expected_digest: str) -> tuple[Tensor, Tensor]:
    """Check the SHA-256 of the packed bytes and undo `pack_digits`."""
    if (digest := sha256(packed).hexdigest()) != expected_digest:
        raise ValueError(f"{FILE_NAME}: expected SHA-256 {expected_digest}, got {digest}")
    raw = lzma.decompress(packed)
    # the labels come last: a header of 8 bytes and one byte per image
    label_bytes = 8 + TRAIN_SIZE + TEST_SIZE
    images, labels = (
        parse_idx(part, FILE_NAME) for part in (raw[:-label_bytes], raw[-label_bytes:])
    )
    return pair_images_with_labels(images, labels, FILE_NAME)


def _embedded_file() -> Traversable:
    return files("pliant.data").joinpath("embedded", FILE_NAME)
