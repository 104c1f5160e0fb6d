"""The two mixtures of AdaSplit: five clients, each with its own classes or its own kind of image.

Chopra et al., "AdaSplit: Adaptive Trade-offs for Resource-constrained Distributed Deep Learning",
2021. The authors' code permutes the pixels of Mixed-NonIID by accident; here the images are right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.data.federated import Federated, Source
from pliant.data.images import Images, Indices, Statistics
from pliant.data.named import cifar10, cifar100, fashion_mnist, mnist, notmnist
from pliant.rng import stream

# what the authors normalise by, for each kind of image
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_CIFAR_BYTES = (
    (125.3 / 255, 123.0 / 255, 113.9 / 255),
    (63.0 / 255, 62.1 / 255, 66.7 / 255),
)
_MNIST = ((0.1,) * 3, (0.2752,) * 3)
_FASHION = ((0.2190,) * 3, (0.3318,) * 3)
_NOTMNIST = ((0.4254,) * 3, (0.4501,) * 3)


@dataclass(frozen=True, eq=False)
class Client:
    """What one client trains on and is tested on; `validation` is for choices made on the way."""

    name: str
    train: Images
    test: Images
    validation: Images


@dataclass(frozen=True, eq=False)
class Mixture:
    """Clients that share one output layer of `classes` units."""

    name: str
    clients: tuple[Client, ...]
    classes: int


def mixed_noniid(root: Path | None = None, seed: int = 0) -> Mixture:
    """Give each of five clients five classes of another data set, relabelled 0 to 4.

    Train, test and validation parts are 70, 20 and 10 % of the pooled set. The same label means
    another thing to every client.
    """
    sources: tuple[tuple[Callable[[Path | None], Source], Statistics], ...] = (
        (cifar100, _CIFAR_BYTES),
        (cifar10, _CIFAR_BYTES),
        (fashion_mnist, _FASHION),
        (mnist, _MNIST),
        (notmnist, _NOTMNIST),
    )
    clients = []
    for load, statistics in sources:
        source = load(root)
        clients.append(noniid_client(source, statistics, seed))
    return Mixture("mixed_noniid", tuple(clients), classes=5)


def mixed_cifar(root: Path | None = None, seed: int = 0) -> Mixture:
    """Give each of five clients two classes of CIFAR-10, labels as they are, split 90 to 10 %."""
    source = cifar10(root)
    pixels, labels = _pooled(source)
    order = stream(seed, "mixture", "mixed_cifar", "classes").permutation(10)
    clients = []
    for number, pair in enumerate(order.reshape(5, 2)):
        chosen = _members(labels, pair)
        chosen = stream(seed, "mixture", "mixed_cifar", "split", number).permutation(chosen)
        cut = round(0.9 * len(chosen))
        parts = (chosen[:cut], chosen[cut:], chosen[:0])
        train, test, validation = (
            Images(pixels[part], labels[part], 10, *_CIFAR, name="mixed_cifar")
            for part in map(torch.from_numpy, map(np.sort, parts))
        )
        clients.append(Client(f"classes {pair[0]} and {pair[1]}", train, test, validation))
    return Mixture("mixed_cifar", tuple(clients), classes=10)


def federated(
    mixture: Mixture, *, samples: int | None = None, tests: int | None = None, seed: int = 0
) -> Federated:
    """Join the clients of a mixture into data shared among as many devices.

    Each device keeps its own test images. `samples` and `tests` bound how many training and test
    images each has, drawn by the seed. The proxy part is what clients hold back for validation.
    """
    clients = mixture.clients
    train, devices = _joined(mixture, [client.train for client in clients], samples, seed, "train")
    test, own = _joined(mixture, [client.test for client in clients], tests, seed, "test")
    proxy, _ = _joined(mixture, [client.validation for client in clients], None, seed, "proxy")
    return Federated(train, test, proxy, devices, np.zeros(0, np.int64), own)


def _joined(
    mixture: Mixture, parts: list[Images], most: int | None, seed: int, what: str
) -> tuple[Images, tuple[Indices, ...]]:
    chosen = []
    for number, part in enumerate(parts):
        order = stream(seed, "mixture", mixture.name, what, number).permutation(len(part))
        chosen.append(np.sort(order[:most]))
    ends = np.cumsum([len(places) for places in chosen])
    shares = tuple(np.split(np.arange(ends[-1]), ends[:-1]))
    pairs = list(zip(parts, chosen, strict=True))
    joined = Images(
        torch.cat([part.pixels[torch.from_numpy(places)] for part, places in pairs]),
        torch.cat([part.labels[torch.from_numpy(places)] for part, places in pairs]),
        mixture.classes,
        parts[0].mean,
        parts[0].std,
        torch.repeat_interleave(torch.tensor([len(places) for places in chosen])),
        mixture.name,
        tuple((part.mean, part.std) for part in parts),
    )
    return joined, shares


def noniid_client(source: Source, statistics: Statistics, seed: int) -> Client:
    """Take five classes of a source, as 3x32x32 images with labels 0 to 4, in three parts."""
    name = source.train.name
    pixels, labels = _pooled(source)
    order = stream(seed, "mixture", "mixed_noniid", "classes", name).permutation(
        source.train.classes
    )[:5]
    relabelled = torch.full((source.train.classes,), -1, dtype=torch.int64)
    relabelled[torch.from_numpy(order)] = torch.arange(5)
    chosen = stream(seed, "mixture", "mixed_noniid", "split", name).permutation(
        _members(labels, order)
    )
    cuts = [round(0.7 * len(chosen)), round(0.9 * len(chosen))]
    train, test, validation = (
        Images(to_colour_32(pixels[part]), relabelled[labels[part]], 5, *statistics, name=name)
        for part in map(torch.from_numpy, map(np.sort, np.split(chosen, cuts)))
    )
    return Client(name, train, test, validation)


def to_colour_32(pixels: Tensor) -> Tensor:
    """Pad images to 32x32 with black all round and copy grey to three channels."""
    _, channels, height, width = pixels.shape
    across, down = 32 - width, 32 - height
    padding = (across // 2, across - across // 2, down // 2, down - down // 2)
    padded = torch.nn.functional.pad(pixels, padding) if across or down else pixels
    return padded.expand(-1, 3, -1, -1).contiguous() if channels == 1 else padded


def _pooled(source: Source) -> tuple[Tensor, Tensor]:
    pixels = torch.cat([source.train.pixels, source.test.pixels])
    return pixels, torch.cat([source.train.labels, source.test.labels])


def _members(labels: Tensor, classes: Indices) -> Indices:
    return np.flatnonzero(np.isin(labels.numpy(), classes))


MIXTURES: dict[str, Callable[[Path | None, int], Mixture]] = {
    "mixed_noniid": mixed_noniid,
    "mixed_cifar": mixed_cifar,
}
