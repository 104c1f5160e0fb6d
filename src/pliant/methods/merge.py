"""Merging: how the changes of many devices, whole or packed, become one change of the network."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

import torch

from pliant.methods.average import accumulate, move, nothing, relative
from pliant.methods.base import State, Update
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params

Weight = Callable[[Update], float | Fraction]
Cover = Callable[[Elastic, Params, Update], Params]  # how much each coordinate was trained: 0 to 1
Weigh = Literal["samples", "macs", "equal"]


def weight_by(weigh: Weigh) -> Weight:
    """Return how much a device counts."""
    return {
        "samples": lambda update: update.samples,
        "macs": lambda update: update.macs,
        "equal": lambda update: 1,
    }[weigh]


def mean_change(
    net: Elastic,
    params: Params,
    updates: Sequence[Update],
    weight: Weight,
    cover: Cover | None = None,
) -> Params:
    """Return the weighted mean change of the full network.

    Without `cover` what a device has not trained counts as unchanged. With it, each coordinate is
    divided by the weights of those who have trained it, and nobody's stays as it is.
    """
    order = sorted(updates, key=lambda update: update.device)
    parts = relative([weight(update) for update in order])
    total, counted = nothing(params), nothing(params) if cover else {}
    whole = 0.0
    for update, part in zip(order, parts, strict=True):
        whole += part
        accumulate(total, _full(net, params, update), part)
        if cover:
            accumulate(counted, cover(net, params, update), part)
    if not cover:
        return {name: tensor / (whole or 1.0) for name, tensor in total.items()}
    return {
        name: torch.where(counted[name] > 0, tensor / counted[name], 0.0)
        for name, tensor in total.items()
    }


def move_trained(net: Elastic, params: Params, change: Params, lr: float) -> Params:
    """Move what is trained at a rate of its own; statistics simply follow the mean."""
    plain = move(params, change)
    fast = plain if lr == 1.0 else move(params, change, lr=lr)
    return {name: (fast if name in net.trained else plain)[name] for name in params}


def _full(net: Elastic, params: Params, update: Update) -> Params:
    if update.subnet is None:
        return update.change
    zeros = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    return net.put(zeros, update.change, update.subnet)


def held(net: Elastic, params: Params, update: Update) -> Params:
    """Cover what a device was sent: one where it has the coordinate."""
    if update.subnet is None:
        return {name: torch.ones_like(tensor) for name, tensor in params.items()}
    return net.embed(params, update.change, update.subnet)[1]


def stepped(net: Elastic, params: Params, update: Update) -> Params:
    """Cover by the share of a device's steps that have trained a coordinate."""
    counts = nothing(params)
    steps = sum(number for _, number in update.trained)
    for subnet, number in update.trained:
        slices = net.bind(subnet).slices
        for name, found in counts.items():
            cut = slices.get(name)
            if cut is None or cut.rows is None:
                found += number
            else:
                found.view(-1, cut.block)[cut.rows] += number
    return {name: found / steps for name, found in counts.items()}


def touched(net: Elastic, params: Params, update: Update) -> Params:
    """Cover what any step of a device has trained."""
    return {name: (part > 0) * 1.0 for name, part in stepped(net, params, update).items()}


FILTERS = "filters"


def seen_filters(state: State, updates: Sequence[Update]) -> Params:
    """Return for each site which filters any device has trained so far."""
    seen = dict(state.extra.get(FILTERS, {}))
    for update in updates:
        for subnet, _ in update.trained:
            for site, mask in enumerate(subnet.masks):
                now = torch.tensor(mask)
                seen[str(site)] = seen.get(str(site), torch.zeros_like(now)) | now
    return seen


def widest_of(net: Elastic, state: State) -> Subnet | None:
    """Return the sub-network of all filters that were trained so far; None if all were."""
    seen = state.extra.get(FILTERS, {})
    masks = tuple(seen[str(site)].numpy() for site in range(len(net.sites)) if seen)
    if not masks or all(mask.all() for mask in masks):
        return None
    return Subnet(net.fingerprint, masks, net.full.scales)
