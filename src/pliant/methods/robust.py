"""Merges that a minority of lying devices cannot ruin, beside the weighted mean.

Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018
(coordinate median, trimmed mean). Blanchard et al., "Machine learning with adversaries: Byzantine
tolerant gradient descent", NeurIPS 2017 (Krum, multi-Krum).
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from pliant.methods.base import Update
from pliant.methods.merge import Cover, Weight, mean_change
from pliant.nn.elastic import Elastic
from pliant.params import Params
from pliant.value import Count, Value

Minority = Annotated[float, Meta(ge=0.0, lt=0.5)]

_ROUNDING = 1e-9  # 0.3 of 10 devices are 3, whatever the last bit says


class Mean(Value, frozen=True, tag="mean"):
    """Take the mean change, weighted as the method says: one liar is enough to ruin it."""


class Median(Value, frozen=True, tag="median"):
    """Take each coordinate's median change over the devices that hold it; no weights.

    Of an even number it is the mean of the two in the middle.
    """

    def change(self, net: Elastic, params: Params, updates: Sequence[Update]) -> Params:
        """Return the change of the full network."""
        return _by_coordinate(net, params, updates, 0.5)


class TrimmedMean(Value, frozen=True, tag="trimmed-mean"):
    """Take each coordinate's mean change without the lowest and highest share; no weights.

    With fewer devices than one for the share, nothing is trimmed.
    """

    share: Minority = 0.2  # of the devices that hold the coordinate, cut at each end

    def change(self, net: Elastic, params: Params, updates: Sequence[Update]) -> Params:
        """Return the change of the full network."""
        return _by_coordinate(net, params, updates, self.share)


class Krum(Value, frozen=True, tag="krum"):
    """Take the change that lies nearest to its neighbours, or the mean of several such; no weights.

    `share` is how many of the devices may lie. n devices stand fewer than (n - 2) / 2 liars: with
    too few for the share, as many are assumed as they stand.
    """

    share: Minority = 0.2
    keep: Count | None = 1  # how many changes are averaged; None: all but the liars' number

    def change(self, net: Elastic, params: Params, updates: Sequence[Update]) -> Params:
        """Return the change of the full network."""
        return mean_change(net, params, self.chosen(updates), lambda update: 1)

    def chosen(self, updates: Sequence[Update]) -> list[Update]:
        """Return the updates that count, in the order of devices."""
        if any(update.subnet is not None for update in updates):
            raise ValueError("Krum: expected updates of the whole network, got packed ones")
        order, count = _ordered(updates), len(updates)
        liars = max(0, min(int(self.share * count + _ROUNDING), (count - 3) // 2))
        neighbours = max(1, count - liars - 2)
        # of itself, each is nearest: the first is not a neighbour
        scores = _distances(order).sort(dim=1).values[:, 1 : 1 + neighbours].sum(dim=1).tolist()
        best = sorted(range(count), key=scores.__getitem__)
        kept = best[: count - liars if self.keep is None else self.keep]
        return [order[place] for place in sorted(kept)]


AnyMerge = Mean | Median | TrimmedMean | Krum


def merged_change(
    how: AnyMerge,
    net: Elastic,
    params: Params,
    updates: Sequence[Update],
    weight: Weight,
    cover: Cover | None = None,
) -> Params:
    """Return the change that a rule makes of many; only the mean looks at weights and cover.

    Of packed updates the robust rules take, for each coordinate, the devices that hold it; Krum
    compares whole updates and refuses them.
    """
    if isinstance(how, Mean):
        return mean_change(net, params, updates, weight, cover)
    return how.change(net, params, updates)


def _ordered(updates: Sequence[Update]) -> list[Update]:
    return sorted(updates, key=lambda update: update.device)


def _by_coordinate(net: Elastic, params: Params, updates: Sequence[Update], share: float) -> Params:
    """Return the mean of what is left of each coordinate when a share is cut at both ends."""
    if not updates:
        return {name: torch.zeros_like(t, dtype=torch.float64) for name, t in params.items()}
    found = [_held(net, params, update) for update in _ordered(updates)]
    return {
        name: _trimmed(
            torch.stack([change[name].to(torch.float64) for change, _ in found]),
            torch.stack([holds[name] > 0 for _, holds in found]),
            share,
        )
        for name in params
    }


def _held(net: Elastic, params: Params, update: Update) -> tuple[Params, Params]:
    """Return a device's change in the full network's shapes, and ones where it has a coordinate."""
    if update.subnet is not None:
        return net.embed(params, update.change, update.subnet)
    return update.change, {name: torch.ones_like(tensor) for name, tensor in params.items()}


def _trimmed(rows: Tensor, holds: Tensor, share: float) -> Tensor:  # both (device, ...)
    count = holds.sum(dim=0)
    # where the share is a half, one is left of an odd number and two are left of an even one
    cut = torch.minimum((share * count + _ROUNDING).long(), (count - 1).clamp(min=0) // 2)
    ranked = torch.where(holds, rows, torch.inf).sort(dim=0).values
    rank = torch.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    is_left = (rank >= cut) & (rank < count - cut)
    total = torch.where(is_left, ranked, 0.0).sum(dim=0)
    return total / (count - 2 * cut).clamp(min=1)  # nobody's coordinate stays as it is


def _distances(updates: Sequence[Update]) -> Tensor:
    """Return squared distances; counters are left out, as their unit would drown the weights."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, first in updates[0].change.items() if updates else ():
        if first.is_floating_point():
            rows = torch.stack([update.change[name].reshape(-1) for update in updates])
            rows = rows.to(torch.float64)
            for place in range(len(updates)):
                total[place] += (rows - rows[place]).square().sum(dim=1)
    return total
