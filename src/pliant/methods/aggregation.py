"""Aggregation: combine the deltas of many devices, full-size or packed, into one."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from pliant.methods.base import Update
from pliant.nn.elastic import Elastic
from pliant.nn.growth import silence_filters
from pliant.nn.subnet import Subnet
from pliant.params import Params


class MispredictedWeights(Exception):
    """The largest weight of a stream of updates turned out to be another than planned."""


class UpdateStream:
    """The updates of a round in device order, to be read once: as they come, none is kept.

    `planned` says what is known of them before they come, in updates without tensors: weights
    follow from it. `seen` holds the updates read so far, also without tensors.

    >>> import pliant as pl
    >>> from pliant.methods.aggregation import UpdateStream
    >>> update = pl.Update(device=7, delta={}, samples=32, steps=2, macs=1e6, loss=0.3)
    >>> stream = UpdateStream([update], iter([update]))
    >>> [update.samples for update in stream], len(stream.seen)
    ([32], 1)
    """

    def __init__(self, planned: Sequence[Update], updates: Iterator[Update]) -> None:
        self.planned, self._updates = planned, updates
        self.seen: list[Update] = []
        self._observers: list[Callable[[Update], None]] = []

    def observe(self, observer: Callable[[Update], None]) -> None:
        """Call a function with each update as it is read."""
        self._observers.append(observer)

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            self.seen.append(remove_tensors(update))
            for observer in self._observers:
                observer(update)
            yield update


def remove_tensors(update: Update) -> Update:
    """Return what an update says apart from its tensors."""
    return replace(update, delta={}, extra={}, device_state=None, residual={}, base={})


Updates = Iterable[Update] | UpdateStream


def open_stream(updates: Updates) -> UpdateStream:
    """Return updates as a stream in device order, unless they are one already."""
    if isinstance(updates, UpdateStream):
        return updates
    ordered = sorted(updates, key=lambda update: update.device)
    return UpdateStream(ordered, iter(ordered))


@runtime_checkable
class MergesStream(Protocol):
    """By default `merge` gets all updates of a round in a list."""

    @property
    def merges_stream(self) -> bool:
        """Return whether `merge` also takes an `UpdateStream`."""


def scale_weights(weights: Sequence[float | Fraction]) -> list[float]:
    """Divide weights by the largest, exactly, so that equal ratios give equal bits.

    >>> scale_weights([2.0, 6.0]) == scale_weights([300, 900]) == [1 / 3, 1.0]
    True
    """
    largest = _find_largest(weights)
    return [float(Fraction(weight) / largest) for weight in weights]


def _find_largest(weights: Sequence[float | Fraction]) -> Fraction:
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights or [1]):
        raise ValueError(f"Expected weights >= 0, not all 0, got {[*map(float, weights)]}")
    return Fraction(max(weights, default=1))


def make_zeros(params: Params) -> Params:
    """Make float64 accumulators for a sum."""
    return {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in params.items()}


def add_weighted(total: Params, terms: Params, weight: float) -> None:
    """Add weighted tensors to a running sum, in place."""
    for name, term in terms.items():
        total[name].add_(term.to(torch.float64), alpha=weight)


def apply_delta(params: Params, delta: Params, *, lr: float = 1.0) -> Params:
    """Add a delta to the parameters; integers are rounded.

    >>> import torch
    >>> import pliant as pl
    >>> pl.apply_delta({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -1.0])})["w"].tolist()
    [1.5, 0.0]
    """
    return {name: _add_scaled(tensor, delta[name], lr) for name, tensor in params.items()}


def _add_scaled(tensor: Tensor, delta: Tensor, lr: float) -> Tensor:
    moved = torch.add(tensor.to(torch.float64), delta, alpha=lr)
    return (moved if tensor.is_floating_point() else moved.round()).to(tensor.dtype)


WeightFn = Callable[[Update], float | Fraction]
# How much an update trained each coordinate: 0 to 1.
CoverFn = Callable[[Elastic, Params, Update], Params]
Weighting = Literal["samples", "macs", "equal"]


def weight_by(weighting: Weighting) -> WeightFn:
    """Return the function that weights a device's update.

    >>> import pliant as pl
    >>> pl.weight_by("samples")(pl.Update(7, {}, samples=32, steps=2, macs=1e6, loss=0.3))
    32
    """
    return {
        "samples": lambda update: update.samples,
        "macs": lambda update: update.macs,
        "equal": lambda update: 1,
    }[weighting]


def average_deltas(
    net: Elastic,
    params: Params,
    updates: Updates,
    weight: WeightFn,
    cover: CoverFn | None = None,
) -> Params:
    """Return the weighted mean delta of the full network.

    Without `cover`, coordinates that a device did not train count as unchanged. With it, each
    coordinate is averaged over the devices that trained it; untrained ones stay as they are.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(torch.nn.Linear(1, 1, bias=False), torch.zeros(1, 1))
    >>> def make_update(device, samples, value):
    ...     return pl.Update(device, {"weight": torch.full((1, 1), value)}, samples, 1, 1.0, 0.0)
    >>> updates = [make_update(0, 1, 0.0), make_update(1, 3, 4.0)]
    >>> pl.average_deltas(net, pl.get_params(net.module), updates, pl.weight_by("samples"))
    {'weight': tensor([[3.]], dtype=torch.float64)}
    """
    stream = open_stream(updates)
    largest = _find_largest([weight(update) for update in stream.planned])
    total, covered = make_zeros(params), make_zeros(params) if cover else {}
    weights, weight_sum = [], 0.0
    for update in stream:
        weights.append(Fraction(weight(update)))
        share = float(weights[-1] / largest)
        weight_sum += share
        add_weighted(total, _unpack_delta(net, params, update), share)
        if cover:
            add_weighted(covered, cover(net, params, update), share)
    if max(weights, default=largest) != largest:
        raise MispredictedWeights
    if not cover:
        return {name: tensor / (weight_sum or 1.0) for name, tensor in total.items()}
    return {
        name: torch.where(covered[name] > 0, tensor / covered[name], 0.0)
        for name, tensor in total.items()
    }


def apply_scaled_delta(net: Elastic, params: Params, delta: Params, lr: float) -> Params:
    """Apply a delta with a learning rate; norm statistics take the delta as it is."""
    unscaled = apply_delta(params, delta)
    scaled = unscaled if lr == 1.0 else apply_delta(params, delta, lr=lr)
    return {name: (scaled if name in net.trainable_names else unscaled)[name] for name in params}


def _unpack_delta(net: Elastic, params: Params, update: Update) -> Params:
    if update.subnet is None:
        return update.delta
    return net.expand(params, update.delta, update.subnet)


def cover_sent(net: Elastic, params: Params, update: Update) -> Params:
    """Cover every coordinate that the device was sent."""
    if update.subnet is None:
        return {name: torch.ones_like(tensor) for name, tensor in params.items()}
    ones = {name: torch.ones_like(tensor) for name, tensor in update.delta.items()}
    return net.expand(params, ones, update.subnet)


def cover_step_share(net: Elastic, params: Params, update: Update) -> Params:
    """Cover each coordinate by the share of the device's steps that trained it."""
    counts = make_zeros(params)
    steps = sum(number for _, number in update.subnet_steps)
    for subnet, number in update.subnet_steps:
        slices = net.bind(subnet).slices
        for name, count in counts.items():
            param_slice = slices.get(name)
            if param_slice is None or param_slice.rows is None:
                count += number
            else:
                count.view(-1, param_slice.block)[param_slice.rows] += number
    return {name: count / steps for name, count in counts.items()}


def cover_trained(net: Elastic, params: Params, update: Update) -> Params:
    """Cover every coordinate that any of the device's steps trained."""
    shares = cover_step_share(net, params, update)
    return {name: (share > 0) * 1.0 for name, share in shares.items()}


@dataclass(frozen=True)
class CoverageState:
    """The network, and one mask per site of the filters that any device has trained so far."""

    params: Params
    trained_filters: Params = field(default_factory=dict)
    momentum: Params = field(default_factory=dict)  # of a server optimiser
    square: Params = field(default_factory=dict)  # likewise


C = TypeVar("C", bound=CoverageState)


def track_coverage(state: C, updates: Sequence[Update]) -> C:
    """Return the state with the filters that these updates trained."""
    trained = dict(state.trained_filters)
    for update in updates:
        for subnet, _ in update.subnet_steps:
            for site, site_mask in enumerate(subnet.masks):
                mask = torch.tensor(site_mask)
                trained[str(site)] = trained.get(str(site), torch.zeros_like(mask)) | mask
    return replace(state, trained_filters=trained)


def build_trained_subnet(net: Elastic, state: CoverageState) -> Subnet | None:
    """Return the subnet of all filters trained so far, or None if every filter was."""
    trained = state.trained_filters
    masks = tuple(trained[str(site)].numpy() for site in range(len(net.sites)) if trained)
    if not masks or all(mask.all() for mask in masks):
        return None
    return Subnet(net.fingerprint, masks, net.full.scales)


def silence_untrained(net: Elastic, state: C) -> C:
    """Return the state of a network that ignores the filters no device has trained yet."""
    trained = build_trained_subnet(net, state)
    if trained is None:
        return state
    return replace(state, params=silence_filters(net, state.params, trained))
