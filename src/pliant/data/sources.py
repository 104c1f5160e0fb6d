"""Loaders of the named data sets, read from the data root."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pliant.data.digits import digits
from pliant.data.download.cache import find_femnist_part, get_data_root, locate_file
from pliant.data.download.published import (
    CIFAR10,
    CIFAR100,
    FASHION_MNIST,
    FEMNIST,
    MNIST,
    NOTMNIST,
    DatasetManifest,
)
from pliant.data.federated import TrainTestData, split_train_test
from pliant.data.formats.cifar import read_cifar
from pliant.data.formats.idx import pair_images_with_labels, read_idx
from pliant.data.formats.leaf import number_users, read_leaf
from pliant.data.formats.mnist_writers import read_writers
from pliant.data.images import ImageDataset, check_labels

# mean and deviation of the training pixels / 255 per channel
_CIFAR10_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100_STATISTICS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def mnist(root: Path | None = None) -> TrainTestData:
    """Load MNIST.

    Images are grouped by writer if `writer_ids.npz` or QMNIST's label tables
    (qmnist-train-labels-idx2-int.gz, qmnist-test-labels-idx2-int.gz) are in the same folder.
    """
    root = get_data_root(root)
    train, test = (_read_idx_pair(MNIST, root, part) for part in ("train", "t10k"))
    writers = read_writers(root, train[1], test[1])
    return TrainTestData(
        train=ImageDataset(*train, 10, (0.1307,), (0.3081,), writers[0], "mnist"),
        test=ImageDataset(*test, 10, (0.1307,), (0.3081,), writers[1], "mnist"),
    )


def fashion_mnist(root: Path | None = None) -> TrainTestData:
    """Load Fashion-MNIST."""
    root = get_data_root(root)
    train, test = (_read_idx_pair(FASHION_MNIST, root, part) for part in ("train", "t10k"))
    return TrainTestData(
        train=ImageDataset(*train, 10, (0.2860,), (0.3530,), name="fashion_mnist"),
        test=ImageDataset(*test, 10, (0.2860,), (0.3530,), name="fashion_mnist"),
    )


def notmnist(root: Path | None = None, *, test: float = 0.2, seed: int = 0) -> TrainTestData:
    """Load notMNIST, with a test part drawn by the seed because it has none."""
    pixels, labels = _read_idx_pair(NOTMNIST, get_data_root(root), "t10k")
    images = ImageDataset(pixels, labels, 10, (0.4266,), (0.4589,), name="notmnist")
    return split_train_test(images, test=test, seed=seed)


def cifar10(root: Path | None = None) -> TrainTestData:
    """Load CIFAR-10 from its binary version."""
    root = get_data_root(root)
    train = [f"data_batch_{number}.bin" for number in range(1, 6)]
    test = ["test_batch.bin"]
    return TrainTestData(
        train=_read_cifar_images(CIFAR10, root, train, classes=10, records_per_file=10_000),
        test=_read_cifar_images(CIFAR10, root, test, classes=10, records_per_file=10_000),
    )


def cifar100(root: Path | None = None) -> TrainTestData:
    """Load CIFAR-100 with its fine labels from its binary version."""
    root = get_data_root(root)
    train, test = ["train.bin"], ["test.bin"]
    return TrainTestData(
        train=_read_cifar_images(CIFAR100, root, train, classes=100, records_per_file=50_000),
        test=_read_cifar_images(CIFAR100, root, test, classes=100, records_per_file=10_000),
    )


def femnist(root: Path | None = None) -> TrainTestData:
    """Load FEMNIST as written by LEAF's scripts, grouped by user."""
    root = get_data_root(root)
    parts = []
    for part in ("train", "test"):
        folder = find_femnist_part(root, part)
        if folder is None:
            raise FileNotFoundError(
                f"{root / FEMNIST.folder / part}: expected LEAF files (all_data_*.json): "
                f"{FEMNIST.manual_instructions} there"
            )
        parts.append(read_leaf(folder, classes=62))
    (pixels, labels, users), (test_pixels, test_labels, test_users) = parts
    groups, test_groups = number_users(users, test_users)
    train = ImageDataset.from_tensors(pixels, labels, classes=62, groups=groups, name="femnist")
    test = ImageDataset(test_pixels, test_labels, 62, train.mean, train.std, test_groups, "femnist")
    return TrainTestData(train=train, test=test)


def _read_idx_pair(manifest: DatasetManifest, root: Path, part: str) -> tuple[Tensor, Tensor]:
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    paths = [locate_file(root, manifest.folder, name, manifest.name) for name in names]
    images, labels = (
        read_idx(path, expected_digest=manifest.file_digest(name))
        for path, name in zip(paths, names, strict=True)
    )
    check_labels(labels.to(torch.int64), 10, paths[1])
    return pair_images_with_labels(images, labels, paths[0])


def _read_cifar_images(
    manifest: DatasetManifest, root: Path, names: list[str], *, classes: int, records_per_file: int
) -> ImageDataset:
    pixels, labels = read_cifar(
        [locate_file(root, manifest.folder, name, manifest.name) for name in names],
        classes=classes,
        label_bytes=1 if classes == 10 else 2,
        records_per_file=records_per_file,
        expected_digests=[manifest.file_digest(name) for name in names],
    )
    statistics = _CIFAR10_STATISTICS if classes == 10 else _CIFAR100_STATISTICS
    return ImageDataset(pixels, labels, classes, *statistics, name=manifest.name)


SOURCES: dict[str, Callable[[Path | None], TrainTestData]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "notmnist": notmnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "femnist": femnist,
}


def load_dataset(name: str, root: Path | None = None) -> TrainTestData:
    """Load the data set with this name."""
    if name not in SOURCES:
        raise LookupError(f"expected one of {', '.join(SOURCES)}, got {name}")
    return SOURCES[name](root)
