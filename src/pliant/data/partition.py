"""Ways to share a training set among devices: every index goes to exactly one device.

Dirichlet shares as in Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural
Networks", 2019; few classes each after McMahan et al., "Communication-Efficient Learning of Deep
Networks from Decentralized Data", 2017.
"""

import heapq
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pliant.rng import stream
from pliant.value import Count, Value

Shares = tuple[NDArray[np.int64], ...]
Numbers = NDArray[np.int64]


class Partition(Protocol):
    """A way to share labelled samples among devices."""

    def split(
        self, labels: Numbers, devices: int, seed: int, groups: Numbers | None = None
    ) -> Shares:
        """Return the indices of each device, sorted; every index once, no device without any."""
        ...


class Iid(Value, frozen=True, tag="iid"):
    """Every device gets a random sample, all of one size (give or take one).

    >>> import numpy as np
    >>> import pliant as pl
    >>> [len(share) for share in pl.Iid().split(np.zeros(10, int), 4, seed=0)]
    [3, 3, 2, 2]
    """

    def split(
        self, labels: Numbers, devices: int, seed: int, groups: Numbers | None = None
    ) -> Shares:
        _check_enough(len(labels), devices)
        order = stream(seed, "partition", "iid").permutation(len(labels))
        return _sorted(np.array_split(order, devices))


class Unequal(Value, frozen=True, tag="unequal"):
    """Random samples of log-normal sizes; `spread` is the deviation of the logarithm, 0 is iid.

    >>> import numpy as np
    >>> import pliant as pl
    >>> shares = pl.Unequal(spread=1.0).split(np.zeros(100, int), 4, seed=0)
    >>> sum(len(share) for share in shares)
    100
    """

    spread: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0

    def split(
        self, labels: Numbers, devices: int, seed: int, groups: Numbers | None = None
    ) -> Shares:
        _check_enough(len(labels), devices)
        rng = stream(seed, "partition", "unequal")
        sizes = 1 + apportion(len(labels) - devices, np.exp(rng.normal(0.0, self.spread, devices)))
        return _sorted(np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1]))


class Dirichlet(Value, frozen=True, tag="dirichlet"):
    """Each class is shared out by its own Dirichlet draw: small `alpha` is skewed, large is iid.

    >>> import numpy as np
    >>> import pliant as pl
    >>> shares = pl.Dirichlet(alpha=0.1).split(np.arange(100) % 2, 4, seed=0)
    >>> sum(len(share) for share in shares)
    100
    """

    alpha: Annotated[float, Meta(ge=1e-3, le=1e6)] = 0.5

    def split(
        self, labels: Numbers, devices: int, seed: int, groups: Numbers | None = None
    ) -> Shares:
        _check_enough(len(labels), devices)
        rng = stream(seed, "partition", "dirichlet")
        owner = np.empty(len(labels), np.int64)
        for members in _by_class(labels):
            weights = rng.dirichlet(np.full(devices, self.alpha))
            counts = apportion(len(members), weights)
            owner[rng.permutation(members)] = np.repeat(np.arange(devices), counts)
        return _shares(_fill_empty(owner, devices, rng), devices)


class Shards(Value, frozen=True, tag="shards"):
    """Every device gets samples of exactly `classes` classes, chosen at random.

    >>> import numpy as np
    >>> import pliant as pl
    >>> labels = np.arange(100) % 10
    >>> shares = pl.Shards(classes=2).split(labels, 5, seed=0)
    >>> [len(np.unique(labels[share])) for share in shares]
    [2, 2, 2, 2, 2]
    """

    classes: Count = 2

    def split(
        self, labels: Numbers, devices: int, seed: int, groups: Numbers | None = None
    ) -> Shares:
        _check_enough(len(labels), devices)
        rng = stream(seed, "partition", "shards")
        members = [rng.permutation(one) for one in _by_class(labels)]
        holders = self._holders(np.array([len(one) for one in members]), devices, rng)
        owner = np.empty(len(labels), np.int64)
        for one, held_by in zip(members, holders, strict=True):
            for device, part in zip(held_by, np.array_split(one, len(held_by)), strict=True):
                owner[part] = device
        return _shares(owner, devices)

    def _holders(self, sizes: Numbers, devices: int, rng: np.random.Generator) -> list[list[int]]:
        most = np.minimum(sizes, devices)
        if self.classes > len(sizes):
            raise ValueError(f"Expected at most {len(sizes)} classes a device, got {self.classes}")
        if not len(sizes) <= devices * self.classes <= most.sum():
            raise ValueError(
                f"Expected {len(sizes)} to {most.sum()} shares for {len(sizes)} classes, "
                f"got {devices} devices with {self.classes} classes each"
            )
        left = _capped(devices * self.classes, sizes, most)
        holders: list[list[int]] = [[] for _ in sizes]
        # taking the classes with most shares left never runs into a dead end (Gale and Ryser)
        for device in rng.permutation(devices):
            order = np.lexsort((rng.random(len(sizes)), -left))[: self.classes]
            left[order] -= 1
            for chosen in order:
                holders[chosen].append(int(device))
        return holders


class ByGroup(Value, frozen=True, tag="by_group"):
    """All images of a writer (or user) stay together; devices that are fewer take several each.

    >>> import numpy as np
    >>> import pliant as pl
    >>> writers = np.array([7, 7, 9, 9])
    >>> shares = pl.ByGroup().split(np.array([0, 1, 0, 1]), 2, seed=0, groups=writers)
    >>> sorted(share.tolist() for share in shares)
    [[0, 1], [2, 3]]
    """

    def split(
        self, labels: Numbers, devices: int, seed: int, groups: Numbers | None = None
    ) -> Shares:
        _check_enough(len(labels), devices)
        if groups is None:
            raise ValueError("Expected images that say who made them (groups), got none")
        _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        if devices > len(sizes):
            raise ValueError(f"Expected at most {len(sizes)} devices, one a group, got {devices}")
        tie = stream(seed, "partition", "group").permutation(len(sizes))
        if devices == len(sizes):
            return _shares(tie[member], devices)
        device_of = np.empty(len(sizes), np.int64)
        load = [(0, device) for device in range(devices)]
        for group in np.lexsort((tie, -sizes)):  # the largest first, to the device with least
            carried, device = heapq.heappop(load)
            device_of[group] = device
            heapq.heappush(load, (carried + int(sizes[group]), device))
        return _shares(device_of[member], devices)


AnyPartition = Iid | Unequal | Dirichlet | Shards | ByGroup


def apportion(total: int, weights: NDArray[np.float64]) -> Numbers:
    """Cut `total` into whole parts as near to these weights as can be (largest remainders)."""
    exact = weights / weights.sum() * total
    parts: Numbers = np.floor(exact).astype(np.int64)
    rest = total - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[:rest]] += 1
    return parts


def summary(shares: Shares, labels: Numbers) -> str:
    """Say in one line how many images and classes the devices have."""
    sizes = np.array([len(share) for share in shares])
    kinds = np.array([len(np.unique(labels[share])) for share in shares])
    return (
        f"{len(shares):,} devices with {sizes.min():,} to {sizes.max():,} images "
        f"(median {np.median(sizes):,.0f}) of {kinds.min()} to {kinds.max()} classes "
        f"(median {np.median(kinds):.0f})"
    )


def _capped(total: int, weights: Numbers, most: Numbers) -> Numbers:
    """Cut `total` by weights with every part between 1 and its cap."""
    parts = np.minimum(np.maximum(apportion(total, weights.astype(np.float64)), 1), most)
    while (rest := total - int(parts.sum())) != 0:
        step = 1 if rest > 0 else -1
        room = np.flatnonzero(parts < most if step > 0 else parts > 1)
        # the part that is furthest from its fair size moves first
        ratio = parts[room] / weights[room]
        parts[room[np.argsort(step * ratio, kind="stable")[: abs(rest)]]] += step
    return parts


def _check_enough(samples: int, devices: int) -> None:
    if devices < 1:
        raise ValueError(f"Expected at least 1 device, got {devices}")
    if devices > samples:
        raise ValueError(f"Expected at most {samples} devices for {samples} samples, got {devices}")


def _by_class(labels: Numbers) -> list[Numbers]:
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels))
    return [part for part in np.split(order, ends[:-1]) if len(part)]


def _fill_empty(owner: Numbers, devices: int, rng: np.random.Generator) -> Numbers:
    """Give each device without samples one from the device that has most."""
    sizes = np.bincount(owner, minlength=devices)
    if sizes.all():
        return owner
    filled = owner.copy()
    given: dict[int, Numbers] = {}
    heap = [(-int(size), device) for device, size in enumerate(sizes)]
    heapq.heapify(heap)
    for device in np.flatnonzero(sizes == 0):
        size, richest = heapq.heappop(heap)
        if richest not in given:
            given[richest] = rng.permutation(np.flatnonzero(owner == richest))
        filled[given[richest][-size - 1]] = device
        heapq.heappush(heap, (size + 1, richest))
    return filled


def _shares(owner: Numbers, devices: int) -> Shares:
    order = np.argsort(owner, kind="stable")  # stable: each share comes out sorted
    return tuple(np.split(order, np.cumsum(np.bincount(owner, minlength=devices))[:-1]))


def _sorted(parts: list[Numbers]) -> Shares:
    return tuple(np.sort(part) for part in parts)
