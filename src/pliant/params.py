"""Arithmetic on named tensors: the parameters and buffers of a network as one value."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

SHARE_ROUNDING = 1e-9  # 0.3 of 10 devices is 3 despite floating point

Params = dict[str, Tensor]


def get_params(net: nn.Module) -> Params:
    """Copy a network's parameters and persistent buffers; a tied tensor is copied once.

    >>> import torch
    >>> import pliant as pl
    >>> list(pl.get_params(torch.nn.Linear(3, 2)))
    ['weight', 'bias']
    """
    saved = net.state_dict().keys()
    named = chain(net.named_parameters(), net.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named if name in saved}


def find_device(net: nn.Module) -> torch.device:
    """Return where a network's first parameter is; the CPU if it has none."""
    return next((tensor.device for tensor in net.parameters()), torch.device("cpu"))


def clone(params: Mapping[str, Tensor]) -> Params:
    return {name: tensor.clone() for name, tensor in params.items()}


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Params:
    return {name: tensor - right[name] for name, tensor in left.items()}


def update_average(average: Params, params: Params, decay: float, count: int) -> Params:
    """Return the exponential moving average after one more value, `count` of which went before.

    Until there are 1 / (1 - decay) values, it is their plain mean. Integers are not averaged.

    >>> import torch
    >>> from pliant.params import update_average
    >>> average = {}
    >>> for count, value in enumerate([1.0, 3.0, 4.0]):
    ...     average = update_average(average, {"w": torch.tensor(value)}, 0.5, count)
    >>> average
    {'w': tensor(3.)}
    """
    share = 1 - min(decay, count / (count + 1))
    if not average or share == 1.0:
        return params
    return {
        name: torch.lerp(average[name], tensor, share) if tensor.is_floating_point() else tensor
        for name, tensor in params.items()
    }


def normalise_weights(weights: Sequence[float]) -> list[float]:
    """Scale weights to sum to one; equal ratios give bit-identical results at any scale.

    >>> normalise_weights([2.0, 6.0]) == normalise_weights([300.0, 900.0]) == [0.25, 0.75]
    True
    """
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(f"Expected weights >= 0 with a positive sum, got {list(weights)}")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return [float(weight / total) for weight in exact]


def weighted_sum(terms: Iterable[tuple[float, Mapping[str, Tensor]]]) -> Params:
    """Sum weight * params in float64, holding one term at a time."""
    total: Params = {}
    for weight, params in terms:
        for name, tensor in params.items():
            wide = tensor.to(torch.float64)
            if name in total:
                total[name].add_(wide, alpha=weight)
            else:
                total[name] = wide * weight
    return total


def digest(params: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, sorted by name."""
    checksum = sha256()
    for name in sorted(params):
        tensor = params[name].detach().cpu().contiguous()
        checksum.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def nbytes(params: Mapping[str, Tensor]) -> int:
    """Return the size of the tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in params.values())


def is_finite(params: Mapping[str, Tensor]) -> bool:
    """Return whether no tensor holds a NaN or an infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in params.values())


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Params:
    """Join nested dictionaries of tensors into one, with `/` between the keys.

    >>> sorted(flatten({"a": {"b": torch.zeros(1)}, "c": torch.ones(1)}))
    ['a/b', 'c']
    """
    flat: Params = {}
    for key, value in tree.items():
        is_leaf = isinstance(value, Tensor)
        flat |= {f"{prefix}{key}": value} if is_leaf else flatten(value, f"{prefix}{key}/")
    return flat


def select_subtree(flat: Mapping[str, Tensor], key: str) -> Params:
    """Return the tensors below one key of a flattened tree."""
    prefix = f"{key}/"
    return {n.removeprefix(prefix): tensor for n, tensor in flat.items() if n.startswith(prefix)}


def group_subtrees(flat: Mapping[str, Tensor]) -> dict[str, Params]:
    """Group the tensors of a flattened tree by their first key."""
    groups: dict[str, Params] = {}
    for name, tensor in flat.items():
        key, _, rest = name.partition("/")
        groups.setdefault(key, {})[rest] = tensor
    return groups


def compute_trimmed_mean(deltas: Tensor, covered: Tensor, share: float) -> Tensor:
    """Trim a share at both ends and average over the first axis, the devices."""
    count = covered.sum(dim=0)
    # a share of one half leaves one value of an odd count and two of an even one
    trimmed = torch.minimum((share * count + SHARE_ROUNDING).long(), (count - 1).clamp(min=0) // 2)
    values = torch.where(covered, deltas, torch.inf).sort(dim=0).values
    rank = torch.arange(len(deltas)).reshape(-1, *[1] * (deltas.ndim - 1))
    is_kept = (rank >= trimmed) & (rank < count - trimmed)
    total = torch.where(is_kept, values, 0.0).sum(dim=0)
    return total / (count - 2 * trimmed).clamp(min=1)  # 0 where no device holds it
