"""Named functions that turn a good update into a bad one."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from pliant.methods.base import Update
from pliant.methods.scaffold import ScaffoldDeviceState
from pliant.methods.state import flatten_state
from pliant.nn.subnet import Subnet

UNEXPECTED = "an unexpected tensor"


class UpdateSubclass(Update):
    """An update by inheritance only."""


def find_largest(update):
    """Return the name of the largest tensor."""
    return max(update.delta, key=lambda name: update.delta[name].numel())


def replace_tensor(make):
    """Replace the largest tensor."""

    def spoil(update):
        name = find_largest(update)
        return replace(update, delta={**update.delta, name: make(update.delta[name].clone())})

    return spoil


def insert_number(number):
    """Write a bad number into the largest tensor."""

    def spoil(tensor):
        tensor.reshape(-1)[-1] = number
        return tensor

    return replace_tensor(spoil)


def claim(**fields):
    return lambda update: replace(update, **fields)


def drop_largest(update):
    return {name: tensor for name, tensor in update.delta.items() if name != find_largest(update)}


def rename_largest(update, name):
    return replace(update, delta={**drop_largest(update), name: update.delta[find_largest(update)]})


def free_storage(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def enlarge_storage(tensor):
    storage = torch.zeros(1000 * tensor.numel())
    storage[: tensor.numel()] = tensor.reshape(-1)
    return storage[: tensor.numel()].view(tensor.shape)


def add_gaps(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def overlap_entries(tensor):
    return torch.ones(1).expand(tensor.numel()).as_strided(tensor.shape, [0] * tensor.ndim)


def replace_first(group, ending, make):
    """Replace the first tensor with this ending, or add an unexpected one."""

    def spoil(update):
        tensors = dict(getattr(update, group))
        name = next((name for name in tensors if name.endswith(ending)), UNEXPECTED)
        tensors[name] = make(tensors.get(name, torch.zeros(2)).clone())
        return replace(update, **{group: tensors})

    return spoil


def spoil_device_state(update):
    """Write NaN into what the device keeps, or keep something unexpected."""
    tensors = flatten_state(update.device_state) or {"weight": torch.zeros(2)}
    return replace(
        update, device_state=ScaffoldDeviceState({n: t * math.nan for n, t in tensors.items()})
    )


def change_filters(update):
    """Claim that the delta belongs to other filters."""
    if update.subnet is None:
        return replace(update, subnet=OTHER_SUBNET)
    inverted = tuple(~mask for mask in update.subnet.masks)
    return replace(update, subnet=Subnet(update.subnet.network, inverted, update.subnet.scales))


def drop_all_filters(subnet):
    return replace(subnet, masks=tuple(np.zeros_like(mask) for mask in subnet.masks))


OTHER_SUBNET = Subnet("another", (np.ones(2, np.bool_),), (1.0,))


BAD_UPDATES = {
    "nothing": lambda update: None,
    "text": lambda update: "an update",
    "a dict": lambda update: dict(vars(update)),
    "an empty object": lambda update: object.__new__(Update),
    "a subclass": lambda update: UpdateSubclass(**vars(update)),
    "of another device": lambda update: replace(update, device=update.device + 1),
    "device as a float": lambda update: replace(update, device=float(update.device)),
    "no delta": claim(delta=None),
    "delta as a list": lambda update: replace(update, delta=list(update.delta.items())),
    "delta is empty": claim(delta={}),
    "a tensor is missing": lambda update: replace(update, delta=drop_largest(update)),
    "a tensor too many": lambda update: replace(
        update, delta={**update.delta, UNEXPECTED: torch.zeros(1)}
    ),
    "a tensor renamed": lambda update: rename_largest(update, "weight\nweight"),
    "a name that is not text": lambda update: rename_largest(update, 7),
    "shape (1,)": replace_tensor(lambda values: torch.ones(1)),
    "a scalar": replace_tensor(lambda values: torch.tensor(1.0)),
    "a leading axis": replace_tensor(lambda values: values[None]),
    "flattened": replace_tensor(lambda values: torch.cat([values.reshape(-1), torch.zeros(1)])),
    "a row less": replace_tensor(lambda values: values[1:].clone()),
    "float64": replace_tensor(lambda values: values.double()),
    "float16": replace_tensor(lambda values: values.half()),
    "complex": replace_tensor(lambda values: values.to(torch.complex64)),
    "integers": replace_tensor(lambda values: values.long()),
    "NaN": insert_number(math.nan),
    "infinity": insert_number(math.inf),
    "minus infinity": insert_number(-math.inf),
    "almost infinity": insert_number(3e38),
    "strides of zero": replace_tensor(overlap_entries),
    "gaps": replace_tensor(add_gaps),
    "sparse": replace_tensor(lambda values: values.to_sparse()),
    "on no device": replace_tensor(lambda values: values.to("meta")),
    "requires a gradient": replace_tensor(lambda values: values.requires_grad_()),
    "a parameter": replace_tensor(lambda values: nn.Parameter(values, requires_grad=False)),
    "a NumPy array": replace_tensor(lambda values: values.numpy()),
    "a list of numbers": replace_tensor(lambda values: values.tolist()),
    "memory freed": replace_tensor(free_storage),
    "too much memory": replace_tensor(enlarge_storage),
    "a negative variance": replace_first("delta", "running_var", lambda values: values - 9),
    "a counter about to overflow": replace_first(
        "delta", "num_batches_tracked", lambda values: values + (2**63 - 9)
    ),
    "an unexpected extra": lambda update: replace(
        update, extra={**update.extra, UNEXPECTED: torch.zeros(1)}
    ),
    "NaN in the extra": replace_first("extra", "", lambda values: values * math.nan),
    "another device state": claim(device_state={"weight": torch.zeros(2)}),
    "NaN in the device state": spoil_device_state,
    "other filters": change_filters,
    "nothing was trained": claim(subnet_steps=()),
    "trained more often than it stepped": lambda update: replace(
        update, subnet_steps=update.subnet_steps * 2
    ),
    "trained another network": lambda update: replace(
        update, subnet_steps=((OTHER_SUBNET, update.steps),)
    ),
    "trained no filter": lambda update: replace(
        update, subnet_steps=((drop_all_filters(update.subnet_steps[0][0]), update.steps),)
    ),
    "more local samples": lambda update: replace(update, num_samples=update.num_samples + 1),
    "no samples": claim(samples=0),
    "samples below zero": claim(samples=-8),
    "samples beyond the task": claim(samples=10**400),
    "samples as a boolean": claim(samples=True),
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

# MACs that a device may claim to gain weight, by the largest possible number
FALSE_MACS = {
    "1e12": lambda largest: 1e12,
    "1e300": lambda largest: 1e300,
    "NaN": lambda largest: math.nan,
    "infinity": lambda largest: math.inf,
    "below zero": lambda largest: -1.0,
    "zero": lambda largest: 0.0,
    "twice the possible": lambda largest: 2 * largest,
    "one bit too much": lambda largest: math.nextafter(largest, math.inf),
    "a huge integer": lambda largest: 10**400,
}
