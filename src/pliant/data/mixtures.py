"""The two mixtures of AdaSplit: five clients, each with its own classes or its own kind of image.

Chopra et al., "AdaSplit: Adaptive Trade-offs for Resource-constrained Distributed Deep Learning",
2021. The authors' code permutes the pixels of Mixed-NonIID by accident; ours does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.data.federated import FederatedData, TrainTestData
from pliant.data.images import ChannelStatistics, ImageDataset, Indices
from pliant.data.sources import load_dataset
from pliant.rng import rng_stream

# the authors' normalisation of each source
_CIFAR_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_CIFAR_BYTE_MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
_CIFAR_BYTE_STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
_NONIID_STATISTICS: dict[str, ChannelStatistics] = {
    "cifar100": (_CIFAR_BYTE_MEAN, _CIFAR_BYTE_STD),
    "cifar10": (_CIFAR_BYTE_MEAN, _CIFAR_BYTE_STD),
    "fashion_mnist": ((0.2190,) * 3, (0.3318,) * 3),
    "mnist": ((0.1,) * 3, (0.2752,) * 3),
    "notmnist": ((0.4254,) * 3, (0.4501,) * 3),
}


@dataclass(frozen=True, eq=False)
class ClientData:
    """The training, test and validation images of one client."""

    name: str
    train: ImageDataset
    test: ImageDataset
    validation: ImageDataset


@dataclass(frozen=True, eq=False)
class Mixture:
    """Clients that share one output layer of `classes` units."""

    name: str
    clients: tuple[ClientData, ...]
    classes: int


def mixed_noniid(root: str | Path | None = None, seed: int = 0) -> Mixture:
    """Give each of five clients five classes of a different data set, relabelled 0 to 4.

    Train, test and validation parts are 70, 20 and 10 % of the pooled set. A label means something
    different to each client.
    """
    clients = tuple(
        make_noniid_client(load_dataset(name, root), statistics, seed)
        for name, statistics in _NONIID_STATISTICS.items()
    )
    return Mixture("mixed_noniid", clients, classes=5)


def mixed_cifar(root: str | Path | None = None, seed: int = 0) -> Mixture:
    """Give each of five clients two classes of CIFAR-10 with their own labels, split 90 to 10 %."""
    pixels, labels = _pool_train_and_test(load_dataset("cifar10", root))
    order = rng_stream(seed, "mixture", "mixed_cifar", "classes").permutation(10)
    clients = []
    for number, pair in enumerate(order.reshape(5, 2)):
        rng = rng_stream(seed, "mixture", "mixed_cifar", "split", number)
        members = rng.permutation(_find_class_members(labels, pair))
        cut = round(0.9 * len(members))
        parts = (members[:cut], members[cut:], members[:0])
        train, test, validation = (
            ImageDataset(pixels[part], labels[part], 10, *_CIFAR_STATISTICS, name="mixed_cifar")
            for part in map(torch.from_numpy, map(np.sort, parts))
        )
        clients.append(ClientData(f"classes {pair[0]} and {pair[1]}", train, test, validation))
    return Mixture("mixed_cifar", tuple(clients), classes=10)


def join_clients(
    mixture: Mixture, *, max_samples: int | None = None, max_tests: int | None = None, seed: int = 0
) -> FederatedData:
    """Join the clients of a mixture into federated data, one device per client.

    Each device keeps its own test images. `max_samples` and `max_tests` limit the training and test
    images of a device, drawn by the seed. The clients' validation images are the proxy part.
    """
    train_parts, test_parts, proxy_parts = zip(
        *((client.train, client.test, client.validation) for client in mixture.clients), strict=True
    )
    train, shares = _join_images(mixture, train_parts, max_samples, seed, "train")
    test, test_shares = _join_images(mixture, test_parts, max_tests, seed, "test")
    proxy, _ = _join_images(mixture, proxy_parts, None, seed, "proxy")
    return FederatedData(train, test, proxy, shares, np.zeros(0, np.int64), test_shares)


def _join_images(
    mixture: Mixture,
    parts: Sequence[ImageDataset],
    max_images: int | None,
    seed: int,
    part_name: str,
) -> tuple[ImageDataset, tuple[Indices, ...]]:
    selected = []
    for number, part in enumerate(parts):
        order = rng_stream(seed, "mixture", mixture.name, part_name, number).permutation(len(part))
        selected.append(part.select(np.sort(order[:max_images])))
    sizes = [len(images) for images in selected]
    ends = np.cumsum(sizes)
    joined = ImageDataset(
        torch.cat([images.pixels for images in selected]),
        torch.cat([images.labels for images in selected]),
        mixture.classes,
        parts[0].mean,
        parts[0].std,
        torch.repeat_interleave(torch.tensor(sizes)),
        mixture.name,
        tuple((part.mean, part.std) for part in parts),
    )
    return joined, tuple(np.split(np.arange(ends[-1]), ends[:-1]))


def make_noniid_client(
    source: TrainTestData, statistics: ChannelStatistics, seed: int
) -> ClientData:
    """Make a client from five classes of a source, as 3x32x32 images with labels 0 to 4."""
    name = source.train.name
    pixels, labels = _pool_train_and_test(source)
    rng = rng_stream(seed, "mixture", "mixed_noniid", "classes", name)
    classes = rng.permutation(source.train.classes)[:5]
    new_labels = torch.full((source.train.classes,), -1, dtype=torch.int64)
    new_labels[torch.from_numpy(classes)] = torch.arange(5)
    rng = rng_stream(seed, "mixture", "mixed_noniid", "split", name)
    members = rng.permutation(_find_class_members(labels, classes))
    cuts = [round(0.7 * len(members)), round(0.9 * len(members))]
    train, test, validation = (
        ImageDataset(
            convert_to_rgb32(pixels[part]), new_labels[labels[part]], 5, *statistics, name=name
        )
        for part in map(torch.from_numpy, map(np.sort, np.split(members, cuts)))
    )
    return ClientData(name, train, test, validation)


def convert_to_rgb32(pixels: Tensor) -> Tensor:
    """Pad images to 32x32 with black and copy grey to three channels."""
    _, channels, height, width = pixels.shape
    across, down = 32 - width, 32 - height
    padding = (across // 2, across - across // 2, down // 2, down - down // 2)
    padded = torch.nn.functional.pad(pixels, padding) if across or down else pixels
    return padded.expand(-1, 3, -1, -1).contiguous() if channels == 1 else padded


def _pool_train_and_test(source: TrainTestData) -> tuple[Tensor, Tensor]:
    pixels = torch.cat([source.train.pixels, source.test.pixels])
    return pixels, torch.cat([source.train.labels, source.test.labels])


def _find_class_members(labels: Tensor, classes: Indices) -> Indices:
    return np.flatnonzero(np.isin(labels.numpy(), classes))


MIXTURES: dict[str, Callable[[Path | None, int], Mixture]] = {
    "mixed_noniid": mixed_noniid,
    "mixed_cifar": mixed_cifar,
}
