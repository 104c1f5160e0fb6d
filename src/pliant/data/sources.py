"""The named data sets: one registry of their loaders and manifests."""

import lzma
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pliant.data.download import published
from pliant.data.download.cache import find_femnist_part, get_data_root, locate_file
from pliant.data.download.published import DataFile, DatasetManifest
from pliant.data.federated import TrainTestData, split_train_test
from pliant.data.formats.cifar import read_cifar
from pliant.data.formats.idx import pair_images_with_labels, parse_idx, read_idx, read_plain_bytes
from pliant.data.formats.leaf import number_users, read_leaf
from pliant.data.formats.mnist_writers import read_writers
from pliant.data.images import ChannelStatistics, ImageDataset, check_labels

# mean and deviation of the training pixels / 255 per channel
_MNIST_STATISTICS = ((0.1307,), (0.3081,))
_FASHION_MNIST_STATISTICS = ((0.2860,), (0.3530,))
_NOTMNIST_STATISTICS = ((0.4266,), (0.4589,))
_CIFAR10_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100_STATISTICS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def digits(root: str | Path | None = None) -> TrainTestData:
    """Load the embedded digits, 8,000 for training and 2,000 for testing; `root` is ignored."""
    (file,) = published.DIGITS.files
    path = Path(published.DIGITS.folder, file.name)
    pixels, labels = (tensor.clone() for tensor in _read_digits(path, file.sha256))
    return TrainTestData(
        ImageDataset(pixels[:8000], labels[:8000], 10, *_MNIST_STATISTICS, name="digits"),
        ImageDataset(pixels[8000:], labels[8000:], 10, *_MNIST_STATISTICS, name="digits"),
    )


@cache  # decompressing them takes longer than a small run
def _read_digits(path: Path, digest: str) -> tuple[Tensor, Tensor]:
    raw = lzma.decompress(read_plain_bytes(path, expected_digest=digest))
    # two idx files; the labels come last: a header of 8 bytes and one byte per image
    images, labels = (parse_idx(part, path) for part in (raw[:-10_008], raw[-10_008:]))
    return pair_images_with_labels(images, labels, path)


def mnist(root: str | Path | None = None) -> TrainTestData:
    """Load MNIST.

    Images are grouped by writer if `writer_ids.npz` or QMNIST's label tables
    (qmnist-train-labels-idx2-int.gz, qmnist-test-labels-idx2-int.gz) are in the same folder.
    """
    train = _read_idx_images(published.MNIST, root, "train", _MNIST_STATISTICS)
    test = _read_idx_images(published.MNIST, root, "t10k", _MNIST_STATISTICS)
    writers, test_writers = read_writers(get_data_root(root), train.labels, test.labels)
    return TrainTestData(replace(train, groups=writers), replace(test, groups=test_writers))


def fashion_mnist(root: str | Path | None = None) -> TrainTestData:
    """Load Fashion-MNIST."""
    return TrainTestData(
        _read_idx_images(published.FASHION_MNIST, root, "train", _FASHION_MNIST_STATISTICS),
        _read_idx_images(published.FASHION_MNIST, root, "t10k", _FASHION_MNIST_STATISTICS),
    )


def notmnist(root: str | Path | None = None, *, test: float = 0.2, seed: int = 0) -> TrainTestData:
    """Load notMNIST, with a test part drawn by the seed because it has none."""
    images = _read_idx_images(published.NOTMNIST, root, "t10k", _NOTMNIST_STATISTICS)
    return split_train_test(images, test=test, seed=seed)


def cifar10(root: str | Path | None = None) -> TrainTestData:
    """Load CIFAR-10 from its binary version."""
    return _load_cifar(published.CIFAR10, root, 10, _CIFAR10_STATISTICS)


def cifar100(root: str | Path | None = None) -> TrainTestData:
    """Load CIFAR-100 with its fine labels from its binary version."""
    return _load_cifar(published.CIFAR100, root, 100, _CIFAR100_STATISTICS)


def femnist(root: str | Path | None = None) -> TrainTestData:
    """Load FEMNIST as written by LEAF's scripts, grouped by user."""
    root = get_data_root(root)
    parts = []
    for part in ("train", "test"):
        folder = find_femnist_part(root, part)
        if folder is None:
            raise FileNotFoundError(
                f"{root / published.FEMNIST.folder / part}: expected LEAF files (all_data_*.json): "
                f"{published.FEMNIST.manual_instructions} there"
            )
        parts.append(read_leaf(folder, classes=62))
    (pixels, labels, users), (test_pixels, test_labels, test_users) = parts
    groups, test_groups = number_users(users, test_users)
    train = ImageDataset.from_tensors(pixels, labels, classes=62, groups=groups, name="femnist")
    test = ImageDataset(test_pixels, test_labels, 62, train.mean, train.std, test_groups, "femnist")
    return TrainTestData(train=train, test=test)


def _read_idx_images(
    manifest: DatasetManifest, root: str | Path | None, part: str, statistics: ChannelStatistics
) -> ImageDataset:
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    paths = [locate_file(get_data_root(root), manifest, name) for name in names]
    digests = {file.name: file.sha256 for file in manifest.files}
    images, labels = (
        read_idx(path, expected_digest=digests[name])
        for path, name in zip(paths, names, strict=True)
    )
    check_labels(labels.to(torch.int64), 10, paths[1])
    pixels, labels = pair_images_with_labels(images, labels, paths[0])
    return ImageDataset(pixels, labels, 10, *statistics, name=manifest.name)


def _load_cifar(
    manifest: DatasetManifest, root: str | Path | None, classes: int, statistics: ChannelStatistics
) -> TrainTestData:
    def read(files: Sequence[DataFile], count: int) -> ImageDataset:
        pixels, labels = read_cifar(
            [locate_file(get_data_root(root), manifest, file.name) for file in files],
            classes=classes,
            label_bytes=1 if classes == 10 else 2,
            records_per_file=count // len(files),
            expected_digests=[file.sha256 for file in files],
        )
        return ImageDataset(pixels, labels, classes, *statistics, name=manifest.name)

    *train, test = manifest.files
    return TrainTestData(read(train, 50_000), read([test], 10_000))


class NamedDataset(NamedTuple):
    """A loader and the files that it reads."""

    load: Callable[[str | Path | None], TrainTestData]
    manifest: DatasetManifest


DATASETS = {
    "digits": NamedDataset(digits, published.DIGITS),
    "mnist": NamedDataset(mnist, published.MNIST),
    "fashion_mnist": NamedDataset(fashion_mnist, published.FASHION_MNIST),
    "notmnist": NamedDataset(notmnist, published.NOTMNIST),
    "cifar10": NamedDataset(cifar10, published.CIFAR10),
    "cifar100": NamedDataset(cifar100, published.CIFAR100),
    "femnist": NamedDataset(femnist, published.FEMNIST),
}


def find_dataset(name: str) -> NamedDataset:
    """Return the data set with this name."""
    if name not in DATASETS:
        raise LookupError(f"expected one of {', '.join(DATASETS)}, got {name!r}")
    return DATASETS[name]


def load_dataset(name: str, root: str | Path | None = None) -> TrainTestData:
    """Load the data set with this name."""
    return find_dataset(name).load(root)
