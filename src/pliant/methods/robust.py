"""Byzantine-robust merges, which a minority of malicious devices cannot ruin.

Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018
(coordinate median, trimmed mean). Blanchard et al., "Machine learning with adversaries: Byzantine
tolerant gradient descent", NeurIPS 2017 (Krum, multi-Krum). Diakonikolas et al., "Being robust (in
high dimensions) can be practical", ICML 2017 (spectral filter, of soft labels).
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from pliant.methods.aggregation import CoverFn, Updates, WeightFn, average_deltas, make_zeros
from pliant.methods.base import Update
from pliant.nn.elastic import Elastic
from pliant.params import SHARE_ROUNDING, Params, compute_trimmed_mean
from pliant.value import Count, Value

Minority = Annotated[float, Meta(ge=0.0, lt=0.5)]


class Mean(Value, frozen=True, tag="mean"):
    """Take the mean delta with the method's weights; a single malicious device can ruin it."""

    def merge_labels(self, labels: Tensor) -> Tensor:
        """Return the mean over devices of soft labels, (device, image, class)."""
        return labels.mean(dim=0)


class Median(Value, frozen=True, tag="median"):
    """Take the unweighted median of each coordinate over the devices that hold it.

    For an even number of devices it is the mean of the middle two.
    """

    def merge_deltas(self, net: Elastic, params: Params, updates: Sequence[Update]) -> Params:
        """Return the merged delta of the full network."""
        return _merge_coordinates(net, params, updates, 0.5)

    def merge_labels(self, labels: Tensor) -> Tensor:
        """Return soft labels merged number by number."""
        return compute_trimmed_mean(labels, torch.ones_like(labels, dtype=torch.bool), 0.5)


class TrimmedMean(Value, frozen=True, tag="trimmed-mean"):
    """Take the unweighted mean of each coordinate without its lowest and highest values.

    With too few devices for the share, nothing is trimmed.
    """

    share: Minority = 0.2  # of the devices that hold the coordinate, trimmed at each end

    def merge_deltas(self, net: Elastic, params: Params, updates: Sequence[Update]) -> Params:
        """Return the merged delta of the full network."""
        return _merge_coordinates(net, params, updates, self.share)

    def merge_labels(self, labels: Tensor) -> Tensor:
        """Return soft labels merged number by number."""
        return compute_trimmed_mean(labels, torch.ones_like(labels, dtype=torch.bool), self.share)


class Krum(Value, frozen=True, tag="krum"):
    """Take the delta nearest to its neighbours, or the unweighted mean of several such deltas.

    `share` is the assumed share of malicious devices. Krum tolerates fewer than (n - 2) / 2 of n
    devices, so the assumed number is capped there.
    """

    share: Minority = 0.2
    keep: Count | None = 1  # deltas to average; None: all but the assumed malicious ones

    def merge_deltas(self, net: Elastic, params: Params, updates: Sequence[Update]) -> Params:
        """Return the merged delta of the full network."""
        return average_deltas(net, params, self.select_updates(updates), lambda update: 1)

    def select_updates(self, updates: Sequence[Update]) -> list[Update]:
        """Return the selected updates in device order."""
        if any(update.subnet is not None for update in updates):
            raise ValueError("Krum: expected updates of the full network, got packed ones")
        ordered, count = _sort_by_device(updates), len(updates)
        malicious = max(0, min(int(self.share * count + SHARE_ROUNDING), (count - 3) // 2))
        neighbours = max(1, count - malicious - 2)
        distances = _compute_distances(ordered).sort(dim=1).values
        # each update is nearest to itself, so skip the first
        scores = distances[:, 1 : 1 + neighbours].sum(dim=1).tolist()
        ranking = sorted(range(count), key=scores.__getitem__)
        selected = ranking[: count - malicious if self.keep is None else self.keep]
        return [ordered[index] for index in sorted(selected)]


class SpectralMean(Value, frozen=True, tag="spectral"):
    """Take the mean of an image's soft labels without the most deviating ones.

    As often as `share` of the devices says, leave out the one farthest from the mean along the
    direction in which those left vary most.
    """

    share: Minority = 0.2

    def merge_labels(self, labels: Tensor) -> Tensor:
        """Return the merged soft labels."""
        devices, images, _ = labels.shape
        kept = torch.ones(devices, images, dtype=labels.dtype)
        for _ in range(int(self.share * devices + SHARE_ROUNDING)):
            weights = kept / kept.sum(dim=0)
            gap = labels - torch.einsum("ds,dsc->sc", weights, labels)
            covariance = torch.einsum("ds,dsi,dsj->sij", weights, gap, gap)
            direction = torch.linalg.eigh(covariance).eigenvectors[..., -1]
            distance = torch.einsum("dsc,sc->ds", gap, direction).abs()
            farthest = torch.where(kept > 0, distance, -1.0).argmax(dim=0)
            kept[farthest, torch.arange(images)] = 0.0
        return torch.einsum("ds,dsc->sc", kept / kept.sum(dim=0), labels)


AnyMerge = Mean | Median | TrimmedMean | Krum
AnyLabelMerge = Mean | Median | TrimmedMean | SpectralMean


def merge_by_rule(
    rule: AnyMerge,
    net: Elastic,
    params: Params,
    updates: Updates,
    weight: WeightFn,
    cover: CoverFn | None = None,
) -> Params:
    """Merge deltas by a rule; only the mean uses `weight` and `cover`.

    The robust rules merge packed updates per coordinate, over the devices that hold it. Krum
    compares full updates and rejects packed ones.
    """
    if isinstance(rule, Mean):
        return average_deltas(net, params, updates, weight, cover)
    return rule.merge_deltas(net, params, list(updates))


def _sort_by_device(updates: Sequence[Update]) -> list[Update]:
    return sorted(updates, key=lambda update: update.device)


def _merge_coordinates(
    net: Elastic, params: Params, updates: Sequence[Update], share: float
) -> Params:
    """Return each coordinate's mean after trimming a share at both ends."""
    if not updates:
        return make_zeros(params)
    unpacked = [_unpack_with_cover(net, params, update) for update in _sort_by_device(updates)]
    return {
        name: compute_trimmed_mean(
            torch.stack([delta[name].to(torch.float64) for delta, _ in unpacked]),
            torch.stack([cover[name] > 0 for _, cover in unpacked]),
            share,
        )
        for name in params
    }


def _unpack_with_cover(net: Elastic, params: Params, update: Update) -> tuple[Params, Params]:
    """Return a full-size delta, and ones where the device holds a coordinate."""
    if update.subnet is not None:
        return net.embed(params, update.delta, update.subnet)
    return update.delta, {name: torch.ones_like(tensor) for name, tensor in params.items()}


def _compute_distances(updates: Sequence[Update]) -> Tensor:
    """Return squared distances, without integer counters, which would dominate the weights."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, first in updates[0].delta.items() if updates else ():
        if first.is_floating_point():
            deltas = torch.stack([update.delta[name].reshape(-1) for update in updates])
            deltas = deltas.to(torch.float64)
            for index in range(len(updates)):
                total[index] += (deltas - deltas[index]).square().sum(dim=1)
    return total
