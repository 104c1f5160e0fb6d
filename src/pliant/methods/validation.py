"""Validate updates before they are merged.

The server trusts no device. A rejected update has no effect: the round's result is, bit for bit,
the same as without it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from pliant.methods.base import Update
from pliant.methods.state import flatten_state
from pliant.nn.compiler.channels import count
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Positive, Value


class ValidationPolicy(Value, frozen=True):
    """Limits on updates, in addition to the checks that always apply.

    `norm` bounds the Euclidean norm of a delta: a longer one is rejected or, with `clip`, scaled
    down. `largest` bounds every merged number, so that the network cannot overflow. `size_factor`
    bounds an update's memory, relative to its expected size.
    """

    norm: Positive | None = None
    clip: bool = False
    largest: Positive = 1e6
    size_factor: Annotated[float, Meta(ge=1.0)] = 2.0

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.clip and self.norm is None:
            raise ValueError("Expected a norm to clip, got None - at `$.norm` of ValidationPolicy")


class TensorSpec(NamedTuple):
    """The expected shape, type and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


TensorSpecs = Mapping[str, TensorSpec]


@dataclass(frozen=True, eq=False)
class UpdateManifest:
    """What a valid update for one task looks like.

    >>> import torch
    >>> from pliant.methods.base import Update
    >>> from pliant.methods.validation import (
    ...     UpdateManifest, ValidationPolicy, find_problem, make_specs
    ... )
    >>> policy, specs = ValidationPolicy(), make_specs({"weight": torch.zeros(2)})
    >>> manifest = UpdateManifest(3, (8, 8), (40.0, 40.0), specs)
    >>> find_problem(Update(3, {"weight": torch.ones(2)}, 16, 2, 80.0, 0.5), manifest, policy)
    >>> find_problem(Update(3, {"weight": torch.ones(1)}, 16, 2, 80.0, 0.5), manifest, policy)
    "device 3: expected delta 'weight' of shape (2,), got (1,)"
    >>> find_problem(Update(3, {"weight": torch.ones(2)}, 16, 2, 1e12, 0.5), manifest, policy)
    'device 3: expected MACs above 0 and up to 80.0 for 2 mini-batches, got 1000000000000.0'
    """

    device: int
    batch_sizes: tuple[int, ...]  # of its mini-batches
    max_macs: tuple[float, ...]  # of each mini-batch
    delta: TensorSpecs
    extra: TensorSpecs = field(default_factory=dict)
    device_state: Any = None  # an example of what the device keeps
    subnet: Subnet | None = None  # of a packed delta
    variances: Params = field(default_factory=dict)  # as sent; must not become negative
    num_samples: int = 0  # on the device
    net: Elastic | None = None  # whose subnets are trained; None: no subnets may be reported


def make_specs(params: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return the specs of these tensors."""
    return {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device)
        for name, tensor in params.items()
    }


def select_variances(params: Mapping[str, Tensor]) -> Params:
    """Return the running variances of norm layers, whose output is NaN if they are negative."""
    return {name: tensor for name, tensor in params.items() if name.endswith("running_var")}


def accept_valid(
    reply: object, manifest: UpdateManifest, policy: ValidationPolicy
) -> tuple[Update | None, str | None]:
    """Return the update in a reply if it is valid, or else the reason for rejecting it."""
    problem = find_problem(reply, manifest, policy)
    if problem is not None or not isinstance(reply, Update):  # only an update has no problem
        return None, problem
    max_norm = policy.norm if policy.clip else None
    return reply if max_norm is None else clip_update(reply, max_norm), None


def find_problem(update: object, manifest: UpdateManifest, policy: ValidationPolicy) -> str | None:
    """Return the reason to reject an update in one line, or None if it is valid."""
    try:
        problem = next(_iter_problems(update, manifest, policy), None)
    except Exception as error:  # no input may stop the server
        problem = f"a readable update, got {type(error).__name__} while reading it"
    return None if problem is None else f"device {manifest.device}: expected {problem}"


def clip_update(update: Update, max_norm: float) -> Update:
    """Scale a longer delta down to this norm."""
    norm = _compute_norm(update.delta)
    if norm <= max_norm:
        return update
    delta = {
        name: (tensor.to(torch.float64) * (max_norm / norm)).to(tensor.dtype)
        for name, tensor in update.delta.items()
    }
    return replace(update, delta=delta)


# The order of checks matters: nothing is used before its type is known. Types are compared exactly,
# because a subclass can override anything.


_UPDATE_FIELDS = frozenset(slot.name for slot in fields(Update))


def _iter_problems(
    update: object, manifest: UpdateManifest, policy: ValidationPolicy
) -> Iterator[str]:
    if type(update) is not Update:
        yield f"an update, got {_describe_type(update)}"
        return
    if not vars(update).keys() >= _UPDATE_FIELDS:
        missing = [slot.name for slot in fields(Update) if slot.name not in vars(update)]
        yield f"an update with {', '.join(missing)}, got one without"
        return
    yield from _check_claims(update, manifest)
    yield from _check_subnet(update.subnet, manifest.subnet)
    yield from _check_trained_subnets(update, manifest.net)
    state_type = type(manifest.device_state)
    if type(update.device_state) is not state_type:
        found = _describe_type(update.device_state)
        yield f"device_state of type {state_type.__name__!r}, got {found}"
    device_state = flatten_state(update.device_state)
    groups: tuple[tuple[str, Params, TensorSpecs, float], ...] = (
        ("delta", update.delta, manifest.delta, policy.largest),
        ("extra", update.extra, manifest.extra, policy.largest),
        ("device_state", device_state, make_specs(flatten_state(manifest.device_state)), math.inf),
    )
    for group, params, specs, _ in groups:
        if type(params) is not dict or params or specs:
            yield from check_tensors(group, params, specs)
    tensors = [tensor for _, params, _, _ in groups for tensor in params.values()]
    yield from _check_size(tensors, policy.size_factor)
    for group, params, _, largest in groups:
        if params:
            yield from check_values(group, params, largest)
    for name, sent in manifest.variances.items():
        lowest = float((sent + update.delta[name]).min()) if sent.numel() else 0.0
        if lowest < -1e-6 * max(1.0, float(sent.abs().max())):  # allow for rounding
            yield f"delta {_format_name(name)} to leave no variance below 0, got {lowest:.3g}"
    if policy.norm is not None and not policy.clip:
        norm = _compute_norm(update.delta)
        if norm > policy.norm:
            yield f"a delta of norm up to {policy.norm:g}, got {norm:.6g}"


def _check_claims(update: Update, manifest: UpdateManifest) -> Iterator[str]:
    """Find impossible numbers among those that a device reports."""
    if type(update.device) is not int or update.device != manifest.device:
        yield f"its own number, got {_format_value(update.device)}"
    max_steps = len(manifest.batch_sizes)
    if type(update.steps) is not int or not 1 <= update.steps <= max_steps:
        yield f"1 to {max_steps} steps, got {_format_value(update.steps)}"
        return
    samples = sum(manifest.batch_sizes[: update.steps])
    if type(update.samples) is not int or not 1 <= update.samples <= samples:
        yield f"1 to {samples} samples in {update.steps} steps, got {_format_value(update.samples)}"
    # summed in the same order as on the device, so that one at full rate passes exactly
    max_macs = [*accumulate(manifest.max_macs[: update.steps], initial=0.0)][-1]
    if type(update.macs) not in (int, float) or not 0 < update.macs <= max_macs:
        yield (
            f"MACs above 0 and up to {max_macs} for {update.steps} mini-batches, "
            f"got {_format_value(update.macs)}"
        )
    if type(update.num_samples) is not int or update.num_samples != manifest.num_samples:
        yield f"{manifest.num_samples} local samples, got {_format_value(update.num_samples)}"
    loss = update.loss
    if loss is not None and not (type(loss) in (int, float) and abs(loss) < math.inf):
        yield f"a finite loss or none, got {_format_value(loss)}"


def _check_subnet(subnet: object, expected: Subnet | None) -> Iterator[str]:
    """Check that a packed delta belongs to the subnet that was sent."""
    if subnet is expected:
        return
    if expected is None:
        yield f"a delta of the full network, got one with {_describe_type(subnet)}"
    elif type(subnet) is not Subnet or type(subnet.masks) is not tuple:
        yield f"the subnet it was sent, got {_describe_type(subnet)}"
    elif subnet.network != expected.network or subnet.scales != expected.scales:
        yield "the subnet it was sent, got one of another network or scale"
    elif len(subnet.masks) != len(expected.masks) or not all(
        type(mask) is np.ndarray and np.array_equal(mask, expected_mask)
        for mask, expected_mask in zip(subnet.masks, expected.masks, strict=True)
    ):
        yield "the subnet it was sent, got one with other filters"


def _check_trained_subnets(update: Update, net: Elastic | None) -> Iterator[str]:
    """Check that the trained subnets are possible and account for all steps."""
    if type(update.subnet_steps) is not tuple or (net is None and update.subnet_steps):
        yield f"subnet_steps as a tuple of subnets, got {_describe_type(update.subnet_steps)}"
        return
    if net is None:
        return
    total = 0
    for pair in update.subnet_steps:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[1]) is not int or pair[1] < 1:
            yield "subnet_steps as pairs of a subnet and its steps, got something else"
        elif not _is_subnet_of(pair[0], net):
            yield "trained subnets of this network, got another"
        total += pair[1]
    if total != update.steps:
        yield f"trained subnets for {update.steps} steps, got {_format_value(total)}"


def _is_subnet_of(subnet: object, net: Elastic) -> bool:
    """Check whether a subnet could have been drawn from a network."""
    if subnet is net.full:
        return True
    if type(subnet) is not Subnet or type(subnet.masks) is not tuple:
        return False
    masks, scales = subnet.masks, subnet.scales
    if subnet.network != net.fingerprint or type(scales) is not tuple:
        return False
    if not len(masks) == len(scales) == len(net.sizes):
        return False
    for mask, scale, size in zip(masks, scales, net.sizes, strict=True):
        if type(mask) is not np.ndarray or mask.dtype != np.bool_ or mask.shape != (size,):
            return False
        if type(scale) is not float or not 0 < scale < math.inf or not np.count_nonzero(mask):
            return False
    return all(count(runs, masks) for runs in net.program.fragile_spans)


def check_tensors(group: str, tensors: object, expected: TensorSpecs) -> Iterator[str]:
    """Find tensors that are missing, unknown, or of another kind than expected."""
    if type(tensors) is not dict:
        yield f"{group} as a dict of tensors, got {_describe_type(tensors)}"
        return
    for name in expected:
        if name not in tensors:
            yield f"{group} {_format_name(name)}, got none"
    for name, tensor in tensors.items():
        if type(name) is not str or name not in expected:
            yield f"no other {group} tensors, got {_format_name(name)}"
            continue
        if (problem := _find_tensor_problem(tensor, expected[name])) is not None:
            yield f"{group} {_format_name(name)} {problem}"


def _find_tensor_problem(tensor: object, spec: TensorSpec) -> str | None:
    """Return what a tensor should be and is not, or None."""
    if type(tensor) is not Tensor:
        return f"as a plain tensor, got {_describe_type(tensor)}"
    if tensor.shape != spec.shape:
        return f"of shape {spec.shape}, got {tuple(tensor.shape)}"
    if tensor.dtype != spec.dtype:
        return f"of {spec.dtype}, got {tensor.dtype}"
    problem = _find_memory_problem(tensor, spec.device)
    return problem and f"as a plain dense tensor in memory, got one {problem}"


def _find_memory_problem(tensor: Tensor, device: torch.device) -> str | None:
    """Return why a tensor is not a dense array in the memory of a device, or None."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "that is sparse"
    if tensor.device != device:
        return f"on {tensor.device.type}"
    if tensor.requires_grad:
        return "that requires a gradient"
    if tensor.is_conj() or tensor.is_neg():
        return "that is a lazy view"
    if not tensor.is_contiguous() and not _is_dense(tensor):
        return f"with overlaps or gaps (strides {tensor.stride()})"
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < end:
        return "without memory behind it"
    return None


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _check_size(tensors: list[Tensor], size_factor: float) -> Iterator[str]:
    expected, storage_sizes = 0, {}
    for tensor in tensors:
        expected += tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        storage_sizes[storage.data_ptr()] = storage.nbytes()
    size = sum(storage_sizes.values())
    if size > size_factor * expected:
        yield f"no more than {size_factor * expected:.0f} bytes, got {size}"


def check_values(group: str, params: Params, largest: float) -> Iterator[str]:
    """Find numbers that are not finite, or beyond the largest."""
    if _estimate_norm(params) < 0.99 * largest:  # the norm bounds every number
        return
    for name, tensor in params.items():
        label, norm = f"{group} {_format_name(name)}", _compute_norm({name: tensor})
        if not math.isfinite(norm):
            yield f"{label} of finite numbers, got {_describe_nonfinite(tensor)}"
        elif norm > largest:
            maximum = float(tensor.to(torch.float64).abs().max())
            if maximum > largest:
                yield f"{label} of numbers up to {largest:g}, got {maximum:.6g}"


def _estimate_norm(params: Params) -> float:
    """Return the Euclidean norm, rounded as the tensors are: fast, but it may overflow."""
    tensors = [x if x.is_floating_point() else x.to(torch.float64) for x in params.values()]
    return math.hypot(*[norm.item() for norm in torch._foreach_norm(tensors)]) if tensors else 0.0


def _compute_norm(params: Params) -> float:
    """Return the Euclidean norm in float64, which is finite only if every number is."""
    norms = [
        torch.linalg.vector_norm(
            tensor if tensor.is_floating_point() else tensor.to(torch.float64), dtype=torch.float64
        )
        for tensor in params.values()
    ]
    if len(norms) == 1:
        return float(norms[0])
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _describe_nonfinite(tensor: Tensor) -> str:
    count = int((~torch.isfinite(tensor)).sum())
    return f"{count} that are not" if count else "a norm that overflows"


def _format_name(name: object) -> str:
    text = repr(name) if type(name) is str else _describe_type(name)
    return text if len(text) <= 80 else f"{text[:77]}…'"


def _format_value(value: object) -> str:
    if type(value) not in (int, float, bool, str, type(None)):
        return _describe_type(value)
    if type(value) is int and abs(value) >= 10**30:  # Python refuses to print huge integers
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _describe_type(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__[:40]!r}"
