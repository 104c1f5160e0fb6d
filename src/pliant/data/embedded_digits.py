"""Ten thousand real MNIST digits that travel inside the package: nothing to download."""

import lzma
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from torch import Tensor

from pliant.data.federated import Source
from pliant.data.idx import images_and_labels, parse_idx, to_idx
from pliant.data.images import Images
from pliant.data.store import Status

NAME = "digits.idx.xz"
SHA256 = "19bdc258ab1631fbba9d0ff0941ce504d35d264050e18186fcdbaf4a8d313d59"
TRAIN, TEST = 8_000, 2_000
MEAN, STD = (0.1307,), (0.3081,)  # of the whole MNIST training set


def digits(root: Path | None = None) -> Source:
    """Load the embedded digits: 8,000 to train on and 2,000 to test on; the root is not needed."""
    images, labels = unpack_digits(_file().read_bytes(), SHA256)
    return Source(
        train=Images(images[:TRAIN], labels[:TRAIN], 10, MEAN, STD, name="digits"),
        test=Images(images[TRAIN:], labels[TRAIN:], 10, MEAN, STD, name="digits"),
    )


def digits_status() -> Status:
    """Check the embedded file against its SHA-256."""
    is_right = sha256(_file().read_bytes()).hexdigest() == SHA256
    place = (str(_file()),)
    return Status(
        name="digits",
        title="MNIST: 10,000 digits, 28x28 grey, inside the package",
        state="complete" if is_right else "damaged",
        present=place if is_right else (),
        damaged=() if is_right else place,
    )


def pack_digits(images: Tensor, labels: Tensor) -> bytes:
    """Put images (n, h, w) and labels, as two idx files end to end, into one xz stream."""
    return lzma.compress(to_idx(images) + to_idx(labels), preset=9 | lzma.PRESET_EXTREME)


def unpack_digits(packed: bytes, pin: str) -> tuple[Tensor, Tensor]:
    """Undo `pack_digits`, after a check against the SHA-256 of the packed bytes."""
    if (found := sha256(packed).hexdigest()) != pin:
        raise ValueError(f"{NAME}: expected contents of SHA-256 {pin}, got {found}")
    raw = lzma.decompress(packed)
    # the labels are the tail: a head of 8 bytes and one byte an image
    tail = 8 + TRAIN + TEST
    return images_and_labels(parse_idx(raw[:-tail], NAME), parse_idx(raw[-tail:], NAME), NAME)


def _file() -> Traversable:
    return files("pliant.data").joinpath("embedded", NAME)
