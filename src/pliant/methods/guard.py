"""The guard in front of every merge: what a valid update looks like, and why another is refused.

The server trusts no device. An update that is refused is as if it had never come: the round's
result is, bit for bit, that of the round without it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Annotated, NamedTuple

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from pliant.methods.base import Update
from pliant.nn.channels import count
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Positive, Value


class Policy(Value, frozen=True):
    """How strict the guard is, beyond what no update may break.

    `norm` bounds the Euclidean length of a change; one above it is refused, or scaled down where
    `clip` says so. `largest` bounds every number that is merged, so that none of them can make the
    network overflow. `bytes` bounds the memory behind an update, in times of what it should hold.
    """

    norm: Positive | None = None
    clip: bool = False
    largest: Positive = 1e6
    bytes: Annotated[float, Meta(ge=1.0)] = 2.0

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.clip and self.norm is None:
            raise ValueError("Expected a norm to clip to - at `$.norm` of Policy, got None")


class Spec(NamedTuple):
    """What a tensor must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Specs = Mapping[str, Spec]


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a valid update to one dispatched task looks like.

    >>> import torch
    >>> from pliant.methods.base import Update
    >>> from pliant.methods.guard import Manifest, Policy, inspect, specs
    >>> wanted = Manifest(3, (8, 8), (40.0, 40.0), specs({"weight": torch.zeros(2)}))
    >>> inspect(Update(3, {"weight": torch.ones(2)}, 16, 2, 80.0, 0.5), wanted, Policy())
    >>> inspect(Update(3, {"weight": torch.ones(1)}, 16, 2, 80.0, 0.5), wanted, Policy())
    "device 3: expected change 'weight' of shape (2,), got (1,)"
    >>> inspect(Update(3, {"weight": torch.ones(2)}, 16, 2, 1e12, 0.5), wanted, Policy())
    'device 3: expected MACs above 0 and up to 80.0 for 2 mini-batches, got 1000000000000.0'
    """

    device: int
    batches: tuple[int, ...]  # samples of each mini-batch that it was given
    macs: tuple[float, ...]  # the most that each can cost
    change: Specs
    extra: Specs = field(default_factory=dict)
    memory: Specs = field(default_factory=dict)
    subnet: Subnet | None = None  # what a packed change belongs to
    variances: Params = field(default_factory=dict)  # as sent; they must not fall below zero
    owned: int = 0  # samples that the device has
    net: Elastic | None = None  # of which sub-networks are trained; None: nothing is told of them


def specs(params: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Return what tensors like these must be."""
    return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in params.items()}


def variances(params: Mapping[str, Tensor]) -> Params:
    """Return the running variances of norm layers, which become NaN below zero."""
    return {name: tensor for name, tensor in params.items() if name.endswith("running_var")}


def admitted(
    replies: Iterable[tuple[int, object]], manifests: Mapping[int, Manifest], policy: Policy
) -> tuple[list[Update], dict[int, str]]:
    """Return the valid updates in the order of devices, and for the other devices the reason.

    A reply comes with the device that sent it, as the transport knows it: what the reply says of
    itself is only a claim. A device that sends two replies is refused as a whole.
    """
    received = list(replies)
    times = Counter(device for device, _ in received)
    kept: dict[int, Update] = {}
    refused: dict[int, str] = {}
    for device, reply in received:
        if device not in manifests:
            refused[device] = f"device {device}: expected no reply, as it was sent no task, got one"
        elif times[device] > 1:
            refused[device] = f"device {device}: expected one reply, got {times[device]}"
        elif (reason := inspect(reply, manifests[device], policy)) is not None:
            refused[device] = reason
        elif isinstance(reply, Update):  # as `inspect` has found
            kept[device] = clipped(reply, policy.norm) if policy.clip and policy.norm else reply
    return [kept[device] for device in sorted(kept)], refused


def inspect(update: object, manifest: Manifest, policy: Policy) -> str | None:
    """Return why an update must be refused, in one line, or None."""
    try:
        problem = next(_problems(update, manifest, policy), None)
    except Exception as error:  # whatever a device sends, the server goes on
        problem = f"an update that can be read, got {type(error).__name__} in reading it"
    return None if problem is None else f"device {manifest.device}: expected {problem}"


def clipped(update: Update, norm: float) -> Update:
    """Scale a change down to a norm, if it is longer."""
    length = _length(update.change)
    if length <= norm:
        return update
    change = {
        name: (tensor.to(torch.float64) * (norm / length)).to(tensor.dtype)
        for name, tensor in update.change.items()
    }
    return replace(update, change=change)


# Problems are found in this order, so that nothing is used before its type is known: a type is
# compared exactly, because a subclass may answer what it likes.


def _problems(update: object, manifest: Manifest, policy: Policy) -> Iterator[str]:
    if type(update) is not Update:
        yield f"an update, got {_kind(update)}"
        return
    missing = [slot.name for slot in fields(Update) if slot.name not in vars(update)]
    if missing:
        yield f"an update with {', '.join(missing)}, got one without"
        return
    yield from _claims(update, manifest)
    yield from _place(update.subnet, manifest.subnet)
    yield from _trained(update, manifest.net)
    groups: tuple[tuple[str, object, Specs], ...] = (
        ("change", update.change, manifest.change),
        ("extra", update.extra, manifest.extra),
        ("memory", update.memory, manifest.memory),
    )
    for group, given, wanted in groups:
        yield from _names(group, given, wanted)
    tensors = [*update.change.values(), *update.extra.values(), *update.memory.values()]
    yield from _size(tensors, policy.bytes)
    yield from _values("change", update.change, policy.largest)
    yield from _values("extra", update.extra, policy.largest)
    yield from _values("memory", update.memory, math.inf)
    for name, sent in manifest.variances.items():
        lowest = float((sent + update.change[name]).min()) if sent.numel() else 0.0
        if lowest < -1e-6 * max(1.0, float(sent.abs().max())):  # rounding may leave a little
            yield f"change {_named(name)} to leave no variance below 0, got {lowest:.3g}"
    if policy.norm is not None and not policy.clip:
        length = _length(update.change)
        if length > policy.norm:
            yield f"a change of norm up to {policy.norm:g}, got {length:.6g}"


def _claims(update: Update, manifest: Manifest) -> Iterator[str]:
    """Find what is impossible in the numbers that a device says of itself."""
    if type(update.device) is not int or update.device != manifest.device:
        yield f"an update of its own, got one that names device {_shown(update.device)}"
    most = len(manifest.batches)
    if type(update.steps) is not int or not 1 <= update.steps <= most:
        yield f"1 to {most} steps, got {_shown(update.steps)}"
        return
    given = sum(manifest.batches[: update.steps])
    if type(update.samples) is not int or not 1 <= update.samples <= given:
        yield f"1 to {given} samples in {update.steps} steps, got {_shown(update.samples)}"
    # summed as a device does, so that one at full rate is just within
    full = [*accumulate(manifest.macs[: update.steps], initial=0.0)][-1]
    if type(update.macs) not in (int, float) or not 0 < update.macs <= full:
        yield (
            f"MACs above 0 and up to {full} for {update.steps} mini-batches, "
            f"got {_shown(update.macs)}"
        )
    if type(update.owned) is not int or update.owned != manifest.owned:
        yield f"{manifest.owned} samples of its own, got {_shown(update.owned)}"
    loss = update.loss
    if loss is not None and not (type(loss) in (int, float) and abs(loss) < math.inf):
        yield f"a finite loss or none, got {_shown(loss)}"


def _place(given: object, wanted: Subnet | None) -> Iterator[str]:
    """Find out whether a packed change belongs where it was sent."""
    if given is wanted:
        return
    if wanted is None:
        yield f"a change of the whole network, got {_kind(given)} with it"
    elif type(given) is not Subnet or type(given.masks) is not tuple:
        yield f"the sub-network that it was sent, got {_kind(given)}"
    elif given.network != wanted.network or given.scales != wanted.scales:
        yield "the sub-network that it was sent, got one of another network or scale"
    elif len(given.masks) != len(wanted.masks) or not all(
        type(mine) is np.ndarray and np.array_equal(mine, theirs)
        for mine, theirs in zip(given.masks, wanted.masks, strict=True)
    ):
        yield "the sub-network that it was sent, got one with other filters"


def _trained(update: Update, net: Elastic | None) -> Iterator[str]:
    """Find out whether the sub-networks that were trained could be, and make up all steps."""
    if type(update.trained) is not tuple or (net is None and update.trained):
        yield f"what was trained as a tuple of sub-networks, got {_kind(update.trained)}"
        return
    if net is None:
        return
    total = 0
    for pair in update.trained:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[1]) is not int or pair[1] < 1:
            yield "what was trained as sub-networks with their steps, got something else"
        elif not _belongs(pair[0], net):
            yield "sub-networks of this network that were trained, got another"
        total += pair[1]
    if total != update.steps:
        yield f"sub-networks for {update.steps} steps, got them for {_shown(total)}"


def _belongs(subnet: object, net: Elastic) -> bool:
    """Tell whether a subnet could have been drawn from a network."""
    if type(subnet) is not Subnet or type(subnet.masks) is not tuple:
        return False
    masks = subnet.masks
    return (
        subnet.network == net.fingerprint
        and all(type(mask) is np.ndarray and mask.dtype == np.bool_ for mask in masks)
        and [mask.shape for mask in masks] == [(size,) for size in net.sizes]
        and all(mask.any() for mask in masks)
        and all(count(pieces, masks) for pieces in net.plan.fragile)
        and type(subnet.scales) is tuple
        and len(subnet.scales) == len(masks)
        and all(type(scale) is float and 0 < scale < math.inf for scale in subnet.scales)
    )


def _names(group: str, given: object, wanted: Specs) -> Iterator[str]:
    if type(given) is not dict:
        yield f"{group} as a dict of tensors, got {_kind(given)}"
        return
    for name in wanted:
        if name not in given:
            yield f"{group} {_named(name)}, got none"
    for name, tensor in given.items():
        if type(name) is not str or name not in wanted:
            yield f"no {group} but what was asked for, got {_named(name)}"
            continue
        spec, what = wanted[name], f"{group} {_named(name)}"
        if type(tensor) is not Tensor:
            yield f"{what} as a plain tensor, got {_kind(tensor)}"
        elif tuple(tensor.shape) != spec.shape:
            yield f"{what} of shape {spec.shape}, got {tuple(tensor.shape)}"
        elif tensor.dtype != spec.dtype:
            yield f"{what} of {spec.dtype}, got {tensor.dtype}"
        elif (oddity := _oddity(tensor)) is not None:
            yield f"{what} as a plain dense tensor in memory, got one {oddity}"


def _oddity(tensor: Tensor) -> str | None:
    """Return what makes a tensor something else than numbers side by side in memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "that is sparse"
    if tensor.device.type != "cpu":
        return f"on {tensor.device.type}"
    if tensor.requires_grad or tensor.grad_fn is not None:
        return "with a gradient to take"
    if tensor.is_conj() or tensor.is_neg():
        return "that is a view to be resolved"
    if not tensor.is_contiguous() and not _is_dense(tensor):
        return f"with overlaps or gaps (strides {tensor.stride()})"
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < end:
        return "without the memory behind it"
    return None


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _size(tensors: list[Tensor], slack: float) -> Iterator[str]:
    wanted, behind = 0, {}
    for tensor in tensors:
        wanted += tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        behind[storage.data_ptr()] = storage.nbytes()
    held = sum(behind.values())
    if held > slack * wanted:
        yield f"no more than {slack * wanted:.0f} bytes, got {held}"


def _values(group: str, params: Params, largest: float) -> Iterator[str]:
    whole = _length(params)
    if math.isfinite(whole) and whole <= largest:  # no number is larger than the length
        return
    for name, tensor in params.items():
        length = _length({name: tensor})
        if not math.isfinite(length):
            yield f"{group} {_named(name)} of finite numbers, got {_wild(tensor)}"
        elif length > largest:
            most = float(tensor.to(torch.float64).abs().max())
            if most > largest:
                yield f"{group} {_named(name)} of numbers up to {largest:g}, got {most:.6g}"


def _length(params: Params) -> float:
    """Return the Euclidean norm in float64; it is finite only if every number is."""
    norms = [
        torch.linalg.vector_norm(
            tensor if tensor.is_floating_point() else tensor.to(torch.float64), dtype=torch.float64
        )
        for tensor in params.values()
    ]
    if len(norms) == 1:
        return float(norms[0])
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _wild(tensor: Tensor) -> str:
    count = int((~torch.isfinite(tensor)).sum())
    return f"{count} that are not" if count else "too large ones"


def _named(name: object) -> str:
    shown = repr(name) if type(name) is str else _kind(name)
    return shown if len(shown) <= 80 else f"{shown[:77]}…'"


def _shown(value: object) -> str:
    if type(value) not in (int, float, bool, str, type(None)):
        return _kind(value)
    if type(value) is int and abs(value) >= 10**30:  # Python refuses to print the longest
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"


def _kind(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__[:40]!r}"
