"""Partitions of a training set among devices: every index goes to exactly one device.

Dirichlet follows Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural
Networks", 2019; Shards follows McMahan et al., "Communication-Efficient Learning of Deep Networks
from Decentralized Data", 2017.
"""

import heapq
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pliant.rng import rng_stream
from pliant.value import Count, Value

IntArray = NDArray[np.int64]
Groups = IntArray | None  # the writer or user of each sample
Shares = tuple[IntArray, ...]  # the samples of each device


class Partition(Protocol):
    """A rule that splits labelled samples among devices."""

    def split(self, labels: IntArray, devices: int, seed: int, groups: Groups = None) -> Shares:
        """Return sorted indices per device; every index is used once and no device is empty."""
        ...


class Iid(Value, frozen=True, tag="iid"):
    """Give every device a random sample of the same size, give or take one.

    >>> import numpy as np
    >>> import pliant as pl
    >>> [len(share) for share in pl.Iid().split(np.zeros(10, int), 4, seed=0)]
    [3, 3, 2, 2]
    """

    def split(self, labels: IntArray, devices: int, seed: int, groups: Groups = None) -> Shares:
        _check_device_count(len(labels), devices)
        order = rng_stream(seed, "partition", "iid").permutation(len(labels))
        return _sort_shares(np.array_split(order, devices))


class LogNormalSizes(Value, frozen=True, tag="unequal"):
    """Give devices random samples of log-normal sizes; `spread` is the deviation of the logarithm.

    >>> import numpy as np
    >>> import pliant as pl
    >>> shares = pl.LogNormalSizes(spread=1.0).split(np.zeros(100, int), 4, seed=0)
    >>> sum(len(share) for share in shares)
    100
    """

    spread: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0  # 0: iid

    def split(self, labels: IntArray, devices: int, seed: int, groups: Groups = None) -> Shares:
        _check_device_count(len(labels), devices)
        rng = rng_stream(seed, "partition", "unequal")
        sizes = 1 + apportion(len(labels) - devices, np.exp(rng.normal(0.0, self.spread, devices)))
        return _sort_shares(np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1]))


class Dirichlet(Value, frozen=True, tag="dirichlet"):
    """Split each class by a Dirichlet draw: small `alpha` is skewed, large `alpha` is nearly iid.

    >>> import numpy as np
    >>> import pliant as pl
    >>> shares = pl.Dirichlet(alpha=0.1).split(np.arange(100) % 2, 4, seed=0)
    >>> sum(len(share) for share in shares)
    100
    """

    alpha: Annotated[float, Meta(ge=1e-3, le=1e6)] = 0.5

    def split(self, labels: IntArray, devices: int, seed: int, groups: Groups = None) -> Shares:
        _check_device_count(len(labels), devices)
        rng = rng_stream(seed, "partition", "dirichlet")
        owner = np.empty(len(labels), np.int64)
        for members in _split_by_class(labels):
            weights = rng.dirichlet(np.full(devices, self.alpha))
            counts = apportion(len(members), weights)
            owner[rng.permutation(members)] = np.repeat(np.arange(devices), counts)
        return _group_by_owner(_fill_empty(owner, devices, rng), devices)


class Shards(Value, frozen=True, tag="shards"):
    """Give every device samples of exactly `classes` classes, chosen at random.

    >>> import numpy as np
    >>> import pliant as pl
    >>> labels = np.arange(100) % 10
    >>> shares = pl.Shards(classes=2).split(labels, 5, seed=0)
    >>> [len(np.unique(labels[share])) for share in shares]
    [2, 2, 2, 2, 2]
    """

    classes: Count = 2

    def split(self, labels: IntArray, devices: int, seed: int, groups: Groups = None) -> Shares:
        _check_device_count(len(labels), devices)
        rng = rng_stream(seed, "partition", "shards")
        classes = [rng.permutation(members) for members in _split_by_class(labels)]
        sizes = np.array([len(members) for members in classes])
        holders = self._assign_holders(sizes, devices, rng)
        owner = np.empty(len(labels), np.int64)
        for members, owners in zip(classes, holders, strict=True):
            for device, part in zip(owners, np.array_split(members, len(owners)), strict=True):
                owner[part] = device
        return _group_by_owner(owner, devices)

    def _assign_holders(
        self, sizes: IntArray, devices: int, rng: np.random.Generator
    ) -> list[list[int]]:
        caps = np.minimum(sizes, devices)
        if self.classes > len(sizes):
            raise ValueError(
                f"Expected at most {len(sizes)} classes per device, got {self.classes}"
            )
        if not len(sizes) <= devices * self.classes <= caps.sum():
            raise ValueError(
                f"Expected {len(sizes)} to {caps.sum()} shares for {len(sizes)} classes, "
                f"got {devices} devices with {self.classes} classes each"
            )
        left = _apportion_capped(devices * self.classes, sizes, caps)
        holders: list[list[int]] = [[] for _ in sizes]
        # always taking the classes with most shares left never gets stuck (Gale and Ryser)
        for device in rng.permutation(devices):
            chosen = np.lexsort((rng.random(len(sizes)), -left))[: self.classes]
            left[chosen] -= 1
            for class_index in chosen:
                holders[class_index].append(int(device))
        return holders


class ByGroup(Value, frozen=True, tag="by_group"):
    """Keep all images of a writer or user together; with fewer devices, each takes several groups.

    >>> import numpy as np
    >>> import pliant as pl
    >>> writers = np.array([7, 7, 9, 9])
    >>> shares = pl.ByGroup().split(np.array([0, 1, 0, 1]), 2, seed=0, groups=writers)
    >>> sorted(share.tolist() for share in shares)
    [[0, 1], [2, 3]]
    """

    def split(self, labels: IntArray, devices: int, seed: int, groups: Groups = None) -> Shares:
        _check_device_count(len(labels), devices)
        if groups is None:
            raise ValueError("Expected images with groups (their writers or users), got none")
        _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        if devices > len(sizes):
            raise ValueError(f"Expected at most {len(sizes)} devices, one per group, got {devices}")
        random_order = rng_stream(seed, "partition", "group").permutation(len(sizes))
        if devices == len(sizes):
            return _group_by_owner(random_order[member], devices)
        device_of = np.empty(len(sizes), np.int64)
        heap = [(0, device) for device in range(devices)]
        # the largest group first, to the emptiest device
        for group in np.lexsort((random_order, -sizes)):
            load, device = heapq.heappop(heap)
            device_of[group] = device
            heapq.heappush(heap, (load + int(sizes[group]), device))
        return _group_by_owner(device_of[member], devices)


AnyPartition = Iid | LogNormalSizes | Dirichlet | Shards | ByGroup


def apportion(total: int, weights: NDArray[np.float64]) -> IntArray:
    """Split `total` into integer parts closest to these weights (largest remainders)."""
    exact = weights / weights.sum() * total
    parts: IntArray = np.floor(exact).astype(np.int64)
    rest = total - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[:rest]] += 1
    return parts


def summarise_shares(shares: Shares, labels: IntArray) -> str:
    """Describe in one line how many images and classes the devices have."""
    sizes = np.array([len(share) for share in shares])
    classes = np.array([len(np.unique(labels[share])) for share in shares])
    return (
        f"{len(shares):,} devices with {sizes.min():,} to {sizes.max():,} images "
        f"(median {np.median(sizes):,.0f}) of {classes.min()} to {classes.max()} classes "
        f"(median {np.median(classes):.0f})"
    )


def _apportion_capped(total: int, weights: IntArray, caps: IntArray) -> IntArray:
    """Split `total` by weights with every part between 1 and its cap."""
    parts = np.minimum(np.maximum(apportion(total, weights.astype(np.float64)), 1), caps)
    while (rest := total - int(parts.sum())) != 0:
        step = 1 if rest > 0 else -1
        room = np.flatnonzero(parts < caps if step > 0 else parts > 1)
        # the part furthest from its fair size changes first
        ratio = parts[room] / weights[room]
        parts[room[np.argsort(step * ratio, kind="stable")[: abs(rest)]]] += step
    return parts


def _check_device_count(samples: int, devices: int) -> None:
    if devices < 1:
        raise ValueError(f"Expected at least 1 device, got {devices}")
    if devices > samples:
        raise ValueError(f"Expected at most {samples} devices for {samples} samples, got {devices}")


def _split_by_class(labels: IntArray) -> list[IntArray]:
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels))
    return [part for part in np.split(order, ends[:-1]) if len(part)]


def _fill_empty(owner: IntArray, devices: int, rng: np.random.Generator) -> IntArray:
    """Give each empty device one sample from the device that has most."""
    sizes = np.bincount(owner, minlength=devices)
    if sizes.all():
        return owner
    filled = owner.copy()
    shuffled: dict[int, IntArray] = {}
    heap = [(-int(size), device) for device, size in enumerate(sizes)]
    heapq.heapify(heap)
    for device in np.flatnonzero(sizes == 0):
        size, largest = heapq.heappop(heap)
        if largest not in shuffled:
            shuffled[largest] = rng.permutation(np.flatnonzero(owner == largest))
        filled[shuffled[largest][-size - 1]] = device
        heapq.heappush(heap, (size + 1, largest))
    return filled


def _group_by_owner(owner: IntArray, devices: int) -> Shares:
    order = np.argsort(owner, kind="stable")  # stable: each share comes out sorted
    return tuple(np.split(order, np.cumsum(np.bincount(owner, minlength=devices))[:-1]))


def _sort_shares(parts: list[IntArray]) -> Shares:
    return tuple(np.sort(part) for part in parts)


def class_counts(shares: Shares, labels: IntArray, classes: int) -> IntArray:
    """Return the table (device, class) of image counts."""
    return np.stack([np.bincount(labels[share], minlength=classes) for share in shares])
