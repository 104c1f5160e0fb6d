"""Arithmetic on named tensors: the parameters and buffers of a network as one value."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from itertools import chain

import torch
from torch import Tensor, nn

Params = dict[str, Tensor]


def params_of(net: nn.Module) -> Params:
    """Copy a network's parameters and persistent buffers out of it, a tied tensor once.

    >>> import torch
    >>> import pliant as pl
    >>> list(pl.params_of(torch.nn.Linear(3, 2)))
    ['weight', 'bias']
    """
    saved = net.state_dict().keys()
    named = chain(net.named_parameters(), net.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named if name in saved}


def clone(params: Mapping[str, Tensor]) -> Params:
    """Copy every tensor."""
    return {name: tensor.clone() for name, tensor in params.items()}


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Params:
    """Return left - right, name by name."""
    return {name: tensor - right[name] for name, tensor in left.items()}


def squared_distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of squared differences over the floating-point tensors of `left`."""
    parts = [
        (tensor - right[name]).square().sum()
        for name, tensor in left.items()
        if tensor.is_floating_point()
    ]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def shares(weights: Sequence[float]) -> list[float]:
    """Scale weights to sum to one, exactly: equal ratios give equal bits, whatever their unit.

    >>> shares([2.0, 6.0]) == shares([300.0, 900.0]) == [0.25, 0.75]
    True
    """
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(f"Expected weights >= 0 with a positive sum, got {list(weights)}")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return [float(weight / total) for weight in exact]


def weighted_sum(terms: Iterable[tuple[float, Mapping[str, Tensor]]]) -> Params:
    """Sum weight * params in float64, one term at a time."""
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
    """Return the SHA-256 of names, types, shapes and bytes, in the order of names."""
    found = sha256()
    for name in sorted(params):
        tensor = params[name].detach().cpu().contiguous()
        found.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def nbytes(params: Mapping[str, Tensor]) -> int:
    """Return how many bytes the tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in params.values())


def is_finite(params: Mapping[str, Tensor]) -> bool:
    """Tell whether no tensor holds a NaN or an infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in params.values())
