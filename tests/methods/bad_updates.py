"""Ways in which an update can be bad, by name: each makes a bad one of a good one."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from pliant.methods.base import Update
from pliant.nn.subnet import Subnet

MISSING = "a tensor that nobody asked for"


class Likeness(Update):
    """Something that is an update by inheritance only."""


def largest(update):
    """Return the name of the tensor with most numbers."""
    return max(update.change, key=lambda name: update.change[name].numel())


def tensor(make):
    """Put another tensor in place of the largest one."""

    def spoil(update):
        name = largest(update)
        return replace(update, change={**update.change, name: make(update.change[name].clone())})

    return spoil


def one(number):
    """Write one bad number into the largest tensor."""

    def spoil(values):
        values.reshape(-1)[-1] = number
        return values

    return tensor(spoil)


def claim(**claims):
    return lambda update: replace(update, **claims)


def without(update):
    return {name: values for name, values in update.change.items() if name != largest(update)}


def renamed(update, name):
    return replace(update, change={**without(update), name: update.change[largest(update)]})


def freed(values):
    values.untyped_storage().resize_(0)
    return values


def roomy(values):
    room = torch.zeros(1000 * values.numel())
    room[: values.numel()] = values.reshape(-1)
    return room[: values.numel()].view(values.shape)


def gappy(values):
    return torch.stack([values, values], dim=-1)[..., 0]


def overlapping(values):
    return torch.ones(1).expand(values.numel()).as_strided(values.shape, [0] * values.ndim)


def one_of(group, ending, make):
    """Spoil the first tensor of this ending, or add one that nobody asked for."""

    def spoil(update):
        found = dict(getattr(update, group))
        name = next((name for name in found if name.endswith(ending)), MISSING)
        found[name] = make(found.get(name, torch.zeros(2)).clone())
        return replace(update, **{group: found})

    return spoil


def elsewhere(update):
    """Claim that the change belongs to other filters."""
    if update.subnet is None:
        return replace(update, subnet=Subnet("another", (np.ones(2, np.bool_),), (1.0,)))
    turned = tuple(~mask for mask in update.subnet.masks)
    return replace(update, subnet=Subnet(update.subnet.network, turned, update.subnet.scales))


def emptied(subnet):
    return replace(subnet, masks=tuple(np.zeros_like(mask) for mask in subnet.masks))


BAD = {
    "nothing": lambda update: None,
    "text": lambda update: "an update",
    "a dict": lambda update: dict(vars(update)),
    "a shell": lambda update: object.__new__(Update),
    "a subclass": lambda update: Likeness(**vars(update)),
    "of another device": lambda update: replace(update, device=update.device + 1),
    "device as a float": lambda update: replace(update, device=float(update.device)),
    "no change": claim(change=None),
    "change as a list": lambda update: replace(update, change=list(update.change.items())),
    "change is empty": claim(change={}),
    "a tensor is missing": lambda update: replace(update, change=without(update)),
    "a tensor too many": lambda update: replace(
        update, change={**update.change, MISSING: torch.zeros(1)}
    ),
    "a tensor renamed": lambda update: renamed(update, "weight\nweight"),
    "a name that is no text": lambda update: renamed(update, 7),
    "shape (1,)": tensor(lambda values: torch.ones(1)),
    "a scalar": tensor(lambda values: torch.tensor(1.0)),
    "a leading axis": tensor(lambda values: values[None]),
    "flattened": tensor(lambda values: torch.cat([values.reshape(-1), torch.zeros(1)])),
    "a row less": tensor(lambda values: values[1:].clone()),
    "float64": tensor(lambda values: values.double()),
    "float16": tensor(lambda values: values.half()),
    "complex": tensor(lambda values: values.to(torch.complex64)),
    "integers": tensor(lambda values: values.long()),
    "NaN": one(math.nan),
    "infinity": one(math.inf),
    "minus infinity": one(-math.inf),
    "almost infinity": one(3e38),
    "strides of zero": tensor(overlapping),
    "gaps": tensor(gappy),
    "sparse": tensor(lambda values: values.to_sparse()),
    "on no device": tensor(lambda values: values.to("meta")),
    "wants a gradient": tensor(lambda values: values.requires_grad_()),
    "a parameter": tensor(lambda values: nn.Parameter(values, requires_grad=False)),
    "an array of NumPy": tensor(lambda values: values.numpy()),
    "a list of numbers": tensor(lambda values: values.tolist()),
    "memory freed": tensor(freed),
    "too much memory": tensor(roomy),
    "a negative variance": one_of("change", "running_var", lambda values: values - 9),
    "a counter at its end": one_of(
        "change", "num_batches_tracked", lambda values: values + (2**63 - 9)
    ),
    "a strange extra": lambda update: replace(
        update, extra={**update.extra, MISSING: torch.zeros(1)}
    ),
    "NaN in the extra": one_of("extra", "", lambda values: values * math.nan),
    "NaN in the memory": one_of("memory", "", lambda values: values * math.nan),
    "other filters": elsewhere,
    "nothing was trained": claim(trained=()),
    "trained more often than it stepped": lambda update: replace(
        update, trained=update.trained * 2
    ),
    "trained another network": lambda update: replace(
        update, trained=((Subnet("another", (np.ones(2, np.bool_),), (1.0,)), update.steps),)
    ),
    "trained no filter": lambda update: replace(
        update, trained=((emptied(update.trained[0][0]), update.steps),)
    ),
    "more samples of its own": lambda update: replace(update, owned=update.owned + 1),
    "no samples": claim(samples=0),
    "samples below zero": claim(samples=-8),
    "samples beyond the task": claim(samples=10**400),
    "samples as a truth": claim(samples=True),
    "samples as a float": lambda update: replace(update, samples=float(update.samples)),
    "no steps": claim(steps=0),
    "steps beyond the task": claim(steps=10**9),
    "steps as a float": lambda update: replace(update, steps=float(update.steps)),
    "MACs as text": claim(macs="1e6"),
    "MACs as a tensor": claim(macs=torch.tensor(1.0)),
    "loss NaN": claim(loss=math.nan),
    "loss infinite": claim(loss=math.inf),
    "loss as text": claim(loss="0.5"),
}

# what a device may say that it has computed, to weigh more
LIES = {
    "1e12": lambda most: 1e12,
    "1e300": lambda most: 1e300,
    "NaN": lambda most: math.nan,
    "infinity": lambda most: math.inf,
    "below zero": lambda most: -1.0,
    "zero": lambda most: 0.0,
    "twice the possible": lambda most: 2 * most,
    "one bit too much": lambda most: math.nextafter(most, math.inf),
    "an endless integer": lambda most: 10**400,
}
