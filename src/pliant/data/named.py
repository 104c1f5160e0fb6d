"""The data sets that pliant knows by name, read from the data root."""

from pathlib import Path

import torch
from torch import Tensor

from pliant.data.cifar import read_cifar
from pliant.data.federated import Source, split_source
from pliant.data.idx import images_and_labels, read_idx
from pliant.data.images import Images, check_labels
from pliant.data.leaf import group_numbers, read_leaf
from pliant.data.published import (
    CIFAR10,
    CIFAR100,
    FASHION_MNIST,
    FEMNIST,
    MNIST,
    NOTMNIST,
    Published,
)
from pliant.data.root import data_root, locate
from pliant.data.store import femnist_part
from pliant.data.writers import read_writers

# mean and deviation of the training pixels / 255, per channel
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def mnist(root: Path | None = None) -> Source:
    """Load MNIST.

    Its images have groups, the writers, where `writer_ids.npz` or the label tables of QMNIST
    (qmnist-train-labels-idx2-int.gz, qmnist-test-labels-idx2-int.gz) lie beside them.
    """
    place = data_root(root)
    train, test = _idx_pair(MNIST, place, "train"), _idx_pair(MNIST, place, "t10k")
    writers = read_writers(place, train[1], test[1])
    return Source(
        train=Images(*train, 10, (0.1307,), (0.3081,), writers[0], "mnist"),
        test=Images(*test, 10, (0.1307,), (0.3081,), writers[1], "mnist"),
    )


def fashion_mnist(root: Path | None = None) -> Source:
    """Load Fashion-MNIST."""
    place = data_root(root)
    train, test = _idx_pair(FASHION_MNIST, place, "train"), _idx_pair(FASHION_MNIST, place, "t10k")
    return Source(
        train=Images(*train, 10, (0.2860,), (0.3530,), name="fashion_mnist"),
        test=Images(*test, 10, (0.2860,), (0.3530,), name="fashion_mnist"),
    )


def notmnist(root: Path | None = None, *, test: float = 0.2, seed: int = 0) -> Source:
    """Load notMNIST; it has no test part of its own, so one is drawn by the seed."""
    pixels, labels = _idx_pair(NOTMNIST, data_root(root), "t10k")
    images = Images(pixels, labels, 10, (0.4266,), (0.4589,), name="notmnist")
    return split_source(images, test=test, seed=seed)


def cifar10(root: Path | None = None) -> Source:
    """Load CIFAR-10 from its binary version."""
    train = [f"data_batch_{number}.bin" for number in range(1, 6)]
    place = data_root(root)
    return Source(
        train=_cifar(CIFAR10, place, train, classes=10, records=10_000),
        test=_cifar(CIFAR10, place, ["test_batch.bin"], classes=10, records=10_000),
    )


def cifar100(root: Path | None = None) -> Source:
    """Load CIFAR-100, with its fine labels, from its binary version."""
    place = data_root(root)
    return Source(
        train=_cifar(CIFAR100, place, ["train.bin"], classes=100, records=50_000),
        test=_cifar(CIFAR100, place, ["test.bin"], classes=100, records=10_000),
    )


def femnist(root: Path | None = None) -> Source:
    """Load FEMNIST as LEAF's scripts write it; the groups are its users."""
    place = data_root(root)
    parts = []
    for part in ("train", "test"):
        folder = femnist_part(place, part)
        if folder is None:
            raise FileNotFoundError(
                f"{place / FEMNIST.folder / part}: expected LEAF files (all_data_*.json): "
                f"{FEMNIST.by_hand} there"
            )
        parts.append(read_leaf(folder, classes=62))
    (pixels, labels, users), (test_pixels, test_labels, test_users) = parts
    groups, test_groups = group_numbers(users, test_users)
    train = Images.from_tensors(pixels, labels, classes=62, groups=groups, name="femnist")
    test = Images(test_pixels, test_labels, 62, train.mean, train.std, test_groups, "femnist")
    return Source(train=train, test=test)


def _idx_pair(published: Published, root: Path, part: str) -> tuple[Tensor, Tensor]:
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    paths = [locate(root, published.folder, name, published.name) for name in names]
    images, labels = (
        read_idx(path, pin=published.pin(name)) for path, name in zip(paths, names, strict=True)
    )
    check_labels(labels.to(torch.int64), 10, paths[1])
    return images_and_labels(images, labels, paths[0])


def _cifar(
    published: Published, root: Path, names: list[str], *, classes: int, records: int
) -> Images:
    pixels, labels = read_cifar(
        [locate(root, published.folder, name, published.name) for name in names],
        classes=classes,
        label_bytes=1 if classes == 10 else 2,
        records=records,
        pins=[published.pin(name) for name in names],
    )
    statistics = _CIFAR10 if classes == 10 else _CIFAR100
    return Images(pixels, labels, classes, *statistics, name=published.name)
