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

from pliant.methods.base import Update, add_mean
from pliant.nn.elastic import Elastic
from pliant.params import Params
from pliant.value import Count, Value

Minority = Annotated[float, Meta(ge=0.0, lt=0.5)]

_ROUNDING = 1e-9  # 0.3 of 10 devices are 3, whatever the last bit says


class Mean(Value, frozen=True, tag="mean"):
    """Add the mean change, weighted as the method says: one liar is enough to ruin it."""

    def merge(self, params: Params, updates: Sequence[Update]) -> Params:
        """Add the plain mean of whole updates."""
        return add_mean(params, updates, [1.0] * len(updates))


class Median(Value, frozen=True, tag="median"):
    """Add each coordinate's median change over the devices that hold it; no weights.

    Of an even number it is the mean of the two in the middle.
    """

    def merge(self, params: Params, updates: Sequence[Update]) -> Params:
        """Add the median of whole updates."""
        return _by_coordinate(params, _whole(updates), 0.5)


class TrimmedMean(Value, frozen=True, tag="trimmed-mean"):
    """Add each coordinate's mean change without the lowest and highest share; no weights.

    With fewer devices than one for the share, nothing is trimmed.
    """

    share: Minority = 0.2  # of the devices that hold the coordinate, cut at each end

    def merge(self, params: Params, updates: Sequence[Update]) -> Params:
        """Add the trimmed mean of whole updates."""
        return _by_coordinate(params, _whole(updates), self.share)


class Krum(Value, frozen=True, tag="krum"):
    """Add the change that lies nearest to its neighbours, or the mean of several such; no weights.

    `share` is how many of the devices may lie. n devices stand fewer than (n - 2) / 2 liars: with
    too few for the share, as many are assumed as they stand.
    """

    share: Minority = 0.2
    keep: Count | None = 1  # how many changes are averaged; None: all but the liars' number

    def merge(self, params: Params, updates: Sequence[Update]) -> Params:
        """Add the chosen ones of whole updates."""
        chosen = [updates[place] for place in self.chosen(updates)]
        return add_mean(params, chosen, [1.0] * len(chosen))

    def chosen(self, updates: Sequence[Update]) -> list[int]:
        """Return the places of the updates that are merged, in rising order."""
        if any(update.subnet is not None for update in updates):
            raise ValueError("Krum: expected updates of the whole network, got packed ones")
        count = len(updates)
        liars = max(0, min(int(self.share * count + _ROUNDING), (count - 3) // 2))
        neighbours = max(1, count - liars - 2)
        # of itself, each is nearest: the first is not a neighbour
        scores = _distances(updates).sort(dim=1).values[:, 1 : 1 + neighbours].sum(dim=1)
        best = sorted(range(count), key=lambda place: (float(scores[place]), place))
        return sorted(best[: count - liars if self.keep is None else self.keep])


AnyMerge = Mean | Median | TrimmedMean | Krum


def merged(
    how: AnyMerge,
    params: Params,
    updates: Sequence[Update],
    weights: Sequence[float],
    *,
    net: Elastic | None = None,
) -> Params:
    """Merge updates into the network by the chosen rule; only the mean looks at weights.

    Packed updates need their network. The robust rules then go, for each coordinate, over the
    devices that hold it; the weighted mean of packed ones is the methods' own affair.
    """
    if not updates:
        return params
    if isinstance(how, Mean):
        _whole(updates)
        return add_mean(params, updates, weights)
    if isinstance(how, Krum) or all(update.subnet is None for update in updates):
        return how.merge(params, updates)
    if net is None:
        raise ValueError("Expected the network with packed updates, got none")
    held = [_held(net, params, update) for update in updates]
    return _by_coordinate(params, held, how.share if isinstance(how, TrimmedMean) else 0.5)


Held = tuple[Params, Params | None]  # changes, and ones where there is one; None: everywhere


def _whole(updates: Sequence[Update]) -> list[Held]:
    if any(update.subnet is not None for update in updates):
        raise ValueError("Expected updates of the whole network, got packed ones")
    return [(update.change, None) for update in updates]


def _held(net: Elastic, params: Params, update: Update) -> Held:
    if update.subnet is None:
        return update.change, None
    return net.embed(params, update.change, update.subnet)


def _by_coordinate(params: Params, held: Sequence[Held], share: float) -> Params:
    """Add the mean of what is left of each coordinate when a share is cut at both ends."""
    if not held:
        return params
    found = {}
    for name, tensor in params.items():
        rows = torch.stack([change[name].to(torch.float64) for change, _ in held])
        holds = torch.stack(
            [
                torch.ones_like(tensor, dtype=torch.bool) if ones is None else ones[name] > 0
                for _, ones in held
            ]
        )
        found[name] = _added(tensor, _trimmed(rows, holds, share))
    return found


def _trimmed(rows: Tensor, holds: Tensor, share: float) -> Tensor:  # both (device, ...)
    count = holds.sum(dim=0)
    # cut so that one is left of an odd number and two of an even one, where the share is a half
    cut = torch.minimum((share * count + _ROUNDING).long(), (count - 1).clamp(min=0) // 2)
    ranked = torch.where(holds, rows, torch.inf).sort(dim=0).values
    rank = torch.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    is_left = (rank >= cut) & (rank < count - cut)
    total = torch.where(is_left, ranked, 0.0).sum(dim=0)
    return total / (count - 2 * cut).clamp(min=1)  # nobody's coordinate stays as it is


def _added(tensor: Tensor, change: Tensor) -> Tensor:
    moved = tensor.to(torch.float64) + change
    return (moved if tensor.is_floating_point() else moved.round()).to(tensor.dtype)


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
