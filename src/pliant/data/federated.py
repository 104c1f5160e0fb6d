"""A data set before and after its partition among devices."""

import math
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.data.images import ImageDataset
from pliant.data.partition import Partition, Shares, class_counts, summarise_shares
from pliant.html_table import make_html_table
from pliant.rng import rng_stream
from pliant.value import Fraction, NonNegative, Value

MAX_HTML_ROWS = 10


class DataGrowth(Value, frozen=True):
    """Let the images of each device arrive over virtual time, in a random order.

    >>> import pliant as pl
    >>> growth = pl.DataGrowth(start=0.3, rate=0.1)
    >>> [growth.count_samples(20, now) for now in (0.0, 2.0, 9.0)]
    [6, 10, 20]
    """

    start: Fraction = 0.3  # share of a device's images that it has at first, at least one
    rate: NonNegative = 0.001  # share that arrives per second

    def count_samples(self, samples: int, now: float) -> int:
        """Return how many of a device's images have arrived."""
        share = min(1.0, self.start + self.rate * now)
        return max(1, math.floor(share * samples + 1e-9))


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Training images partitioned among devices, a proxy part that no device has, and a test part.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.ImageDataset.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.TrainTestData(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> data.sizes(), len(data.proxy)
    ((8, 8, 8, 8), 8)
    """

    train: ImageDataset
    test: ImageDataset
    proxy: ImageDataset
    shares: Shares  # indices into `train`, one array per device
    proxy_indices: NDArray[np.int64]
    test_shares: Shares = ()  # indices into `test`, if each device has its own test images
    growth: DataGrowth | None = None  # of the shares, from their first images on

    def __post_init__(self) -> None:
        if 0 in self.sizes():
            raise ValueError(
                f"{self.train.name}: expected training images on every device, "
                f"found none on device {self.sizes().index(0)}"
            )

    def __len__(self) -> int:
        return len(self.shares)

    def sizes(self) -> tuple[int, ...]:
        """Return the number of images of each device."""
        return tuple(len(share) for share in self.shares)

    def get_share(self, device: int) -> NDArray[np.int64]:
        """Return the indices of a device's images; devices beyond the last share reuse them."""
        return self.shares[device % len(self.shares)]

    def count_samples(self, device: int, now: float | None = None) -> int:
        """Return how many images a device has at a virtual time; in the end, without one."""
        samples = len(self.get_share(device))
        return (
            samples
            if self.growth is None or now is None
            else self.growth.count_samples(samples, now)
        )

    def grow(self, growth: DataGrowth, seed: int) -> "FederatedData":
        """Return the data with shares that grow, in the order in which their images arrive."""
        shares = tuple(
            rng_stream(seed, "growth", device).permutation(share)
            for device, share in enumerate(self.shares)
        )
        return replace(self, shares=shares, growth=growth)

    def hold_out_tests(self, share: float, seed: int) -> "FederatedData":
        """Return the data with a share of each device's images as its own tests, at least one.

        They replace the common test part.
        """
        if self.test_shares:
            raise ValueError(f"{self.train.name}: expected no own tests yet, found some")
        shares: list[NDArray[np.int64]] = []
        tests: list[NDArray[np.int64]] = []
        for device, indices in enumerate(self.shares):
            count = min(max(1, round(share * len(indices))), len(indices) - 1)
            if count < 1:
                raise ValueError(
                    f"{self.train.name}: expected at least 2 images on every device to hold out "
                    f"tests, found {len(indices)} on device {device}"
                )
            order = rng_stream(seed, "device tests", device).permutation(indices)
            tests.append(np.sort(order[:count]))
            shares.append(np.sort(order[count:]))
        ends = np.cumsum([len(part) for part in tests])
        return replace(
            self,
            test=self.train.select(np.concatenate(tests)),
            shares=tuple(shares),
            test_shares=tuple(np.split(np.arange(ends[-1]), ends[:-1])),
        )

    def list_classes(self, device: int, samples: int | None = None) -> tuple[int, ...]:
        """Return the classes of a device's first images, or of all."""
        share = self.get_share(device)[:samples]
        classes: list[int] = np.unique(self.train.labels.numpy()[share]).tolist()
        return tuple(classes)

    def make_example(self) -> Tensor:
        """Return one training image, or else noise of its shape, to trace a network with."""
        if not len(self.train):
            if len(self.train.shape) == 1:
                return torch.zeros((1, *self.train.shape), dtype=torch.int64)
            noise = rng_stream(0, "example").standard_normal((1, *self.train.shape), np.float32)
            return torch.from_numpy(noise)
        return self.train.get_normalised(slice(0, 1))

    def get_test_indices(self, device: int) -> NDArray[np.int64]:
        """Return the indices of one device's test images: its own, or else all."""
        return self.test_shares[device] if self.test_shares else np.arange(len(self.test))

    def compute_digests(self) -> dict[str, str]:
        """Return a digest of the training images, the test images, and who has which of them."""
        hasher = blake2b(digest_size=16)
        for shares in (self.shares, self.test_shares, (self.proxy_indices,)):
            hasher.update(repr([len(share) for share in shares]).encode())
            for share in shares:
                hasher.update(np.asarray(share, np.int64).tobytes())
        if self.growth is not None:
            hasher.update(repr(self.growth).encode())
        train, test = self.train.compute_digest(), self.test.compute_digest()
        return {"train": train, "test": test, "partition": hasher.hexdigest()}

    def summary(self) -> str:
        """Describe the devices, the proxy part and the test part in one line."""
        devices = summarise_shares(self.shares, self.train.labels.numpy())
        return f"{self.train.name}: {devices}; proxy {len(self.proxy):,}, test {len(self.test):,}"

    def __repr__(self) -> str:
        return f"FederatedData({self.summary()})"

    def _repr_html_(self) -> str:
        counts = class_counts(self.shares, self.train.labels.numpy(), self.train.classes)
        rows = [(device, len(share), *counts[device]) for device, share in enumerate(self.shares)]
        header = ("device", "images", *(f"class {number}" for number in range(self.train.classes)))
        title = self.summary()
        if len(rows) > MAX_HTML_ROWS:
            title += f"; the first {MAX_HTML_ROWS} devices"
        return make_html_table(title, header, rows[:MAX_HTML_ROWS])


@dataclass(frozen=True, eq=False)
class TrainTestData:
    """A data set as its publisher splits it."""

    train: ImageDataset
    test: ImageDataset

    def share(
        self,
        partition: Partition,
        devices: int | None = None,
        seed: int = 0,
        *,
        proxy: float | None = None,
        proxy_seed: int | None = None,
    ) -> FederatedData:
        """Hold back a proxy part and partition the rest among devices.

        `proxy` is a count (an int) or a fraction of the training images (a float); by default 5 %,
        at least 1,000 but no more than a fifth. `devices` defaults to the number of groups.
        `proxy_seed` draws the proxy part instead of `seed`, so that runs with different seeds can
        hold back the same images, for example those that a search has seen.
        """
        count = resolve_proxy_size(len(self.train), proxy)
        rng = rng_stream(seed if proxy_seed is None else proxy_seed, "proxy")
        order = rng.permutation(len(self.train))
        proxy_indices, rest = np.sort(order[:count]), np.sort(order[count:])
        labels = self.train.labels.numpy()[rest]
        groups = None if self.train.groups is None else self.train.groups.numpy()[rest]
        if devices is None:
            if groups is None:
                raise ValueError(f"{self.train.name}: expected a number of devices, got none")
            devices = len(np.unique(groups))
        shares = partition.split(labels, devices, seed, groups)
        return FederatedData(
            train=self.train,
            test=self.test,
            proxy=self.train.select(proxy_indices),
            shares=tuple(rest[share] for share in shares),
            proxy_indices=proxy_indices,
        )


def split_train_test(images: ImageDataset, *, test: float, seed: int) -> TrainTestData:
    """Draw a test part from images that come without one."""
    if not 0.0 < test < 1.0:
        raise ValueError(f"{images.name}: expected a test share between 0 and 1, got {test}")
    order = rng_stream(seed, "test part", images.name).permutation(len(images))
    cut = min(max(round(len(images) * test), 1), len(images) - 1)
    if cut < 1:
        raise ValueError(f"{images.name}: expected at least 2 images to split, got {len(images)}")
    return TrainTestData(
        train=images.select(np.sort(order[cut:])), test=images.select(np.sort(order[:cut]))
    )


def resolve_proxy_size(samples: int, proxy: float | None) -> int:
    """Convert a count, a fraction or None into the number of proxy images."""
    if proxy is None:
        return min(max(samples // 20, 1000), samples // 5)
    count = proxy if isinstance(proxy, int) else round(proxy * samples)
    if count < 0 or count >= samples or (isinstance(proxy, float) and proxy > 1.0):
        raise ValueError(
            f"Expected a proxy part of 0 to {samples - 1} images or a fraction below 1, got {proxy}"
        )
    return int(count)
