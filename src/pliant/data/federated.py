"""A data set before and after it is shared among devices."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pliant.data.images import Images
from pliant.data.partition import Partition, Shares, summary
from pliant.rng import stream


@dataclass(frozen=True, eq=False)
class Federated:
    """Training images shared among devices, a proxy part that no device has, and a test part.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.Images.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.Source(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> data.sizes(), len(data.proxy)
    ((8, 8, 8, 8), 8)
    """

    train: Images
    test: Images
    proxy: Images
    devices: Shares  # the indices into `train` of each device
    proxy_indices: NDArray[np.int64]
    tests: Shares = ()  # the indices into `test` of each device, where each has its own

    def __len__(self) -> int:
        return len(self.devices)

    def shard(self, device: int) -> Images:
        """Copy the images of one device."""
        return self.train.subset(self.devices[device])

    def sizes(self) -> tuple[int, ...]:
        """Return how many images each device has."""
        return tuple(len(share) for share in self.devices)

    def test_of(self, device: int) -> NDArray[np.int64]:
        """Return the indices of the test images of one device: its own, or all."""
        return self.tests[device] if self.tests else np.arange(len(self.test))

    def summary(self) -> str:
        """Say in one line what the devices and the proxy part hold."""
        told = summary(self.devices, self.train.labels.numpy())
        return f"{self.train.name}: {told}; proxy {len(self.proxy):,}, test {len(self.test):,}"

    def picture(self, path: Path) -> Path:
        """Draw the classes of each device into a PNG or SVG file."""
        from pliant.data.picture import draw_shares

        return draw_shares(
            path, self.devices, self.train.labels.numpy(), self.train.classes, title=self.summary()
        )


@dataclass(frozen=True, eq=False)
class Source:
    """A data set as its publisher splits it."""

    train: Images
    test: Images

    def share(
        self,
        partition: Partition,
        devices: int | None = None,
        seed: int = 0,
        *,
        proxy: float | None = None,
        proxy_seed: int | None = None,
    ) -> Federated:
        """Hold a proxy part back and share the rest among devices.

        `proxy` is a count (an int) or a fraction of the training images (a float); by default 5 %,
        at least 1,000 but no more than a fifth. Without `devices` there is one for each group.
        `proxy_seed` draws the proxy part in the place of `seed`: one number in many runs keeps what
        a search has seen from the devices of all of them.
        """
        count = proxy_size(len(self.train), proxy)
        drawn_by = seed if proxy_seed is None else proxy_seed
        order = stream(drawn_by, "proxy").permutation(len(self.train))
        held, rest = np.sort(order[:count]), np.sort(order[count:])
        labels = self.train.labels.numpy()[rest]
        groups = None if self.train.groups is None else self.train.groups.numpy()[rest]
        if devices is None:
            if groups is None:
                raise ValueError(f"{self.train.name}: expected a number of devices, got none")
            devices = len(np.unique(groups))
        shares = partition.split(labels, devices, seed, groups)
        return Federated(
            train=self.train,
            test=self.test,
            proxy=self.train.subset(held),
            devices=tuple(rest[share] for share in shares),
            proxy_indices=held,
        )


def split_source(images: Images, *, test: float, seed: int) -> Source:
    """Draw a test part for images that come without one."""
    if not 0.0 < test < 1.0:
        raise ValueError(f"{images.name}: expected a test share between 0 and 1, got {test}")
    order = stream(seed, "test part", images.name).permutation(len(images))
    cut = min(max(round(len(images) * test), 1), len(images) - 1)
    if cut < 1:
        raise ValueError(f"{images.name}: expected at least 2 images to split, got {len(images)}")
    return Source(
        train=images.subset(np.sort(order[cut:])), test=images.subset(np.sort(order[:cut]))
    )


def proxy_size(samples: int, proxy: float | None) -> int:
    """Turn what the user says about the proxy part into a number of images."""
    if proxy is None:
        return min(max(samples // 20, 1000), samples // 5)
    count = proxy if isinstance(proxy, int) else round(proxy * samples)
    if count < 0 or count >= samples or (isinstance(proxy, float) and proxy > 1.0):
        raise ValueError(
            f"Expected a proxy part of 0 to {samples - 1} images or a fraction below 1, got {proxy}"
        )
    return int(count)
