"""Random numbers that two runs of a network agree on, whatever their memory formats and widths."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class FixedRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not annotate it
    """Draw random numbers in the order of indices, or replace them by their mean.

    Torch fills tensors in the order of memory, which depends on the memory format. With
    `is_constant`, a narrow network agrees with a wide one, and dropout does nothing.
    """

    def __init__(self, *, is_constant: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_constant = is_constant

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch imports its compiler to ask it
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if self._is_constant and (result := _compute_mean(func, args, kwargs)) is not None:
            return result
        ordered = pytree.tree_map_only(Tensor, _make_contiguous, args)
        result = func(*ordered, **kwargs)
        for tensor, copy in zip(args, ordered, strict=True):
            if isinstance(tensor, Tensor) and copy is not tensor:
                tensor.copy_(copy)
                result = tensor if result is copy else result
        return result


def _make_contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def _compute_mean(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the result with all random numbers at their mean; None for other operations."""
    packet = func.overloadpacket
    if func is aten.bernoulli_.float:
        probability = args[1] if len(args) > 1 else 0.5
        filled: Tensor = args[0].fill_(probability)
        return filled
    if func is aten.bernoulli.default:
        return args[0].clone()  # type: ignore[no-any-return] # of probabilities
    if packet in (aten.uniform_, aten.normal_):
        low, high = (tuple(args[1:3]) + (0.0, 1.0)[len(args) - 1 :])[:2]
        mean = (low + high) / 2 if packet is aten.uniform_ else low
        return args[0].fill_(mean)  # type: ignore[no-any-return]
    if packet in (aten.rand, aten.rand_like, aten.randn, aten.randn_like):
        result: Tensor = func(*args, **kwargs)
        return result.fill_(0.5 if packet in (aten.rand, aten.rand_like) else 0.0)
    if packet is aten.rrelu_with_noise:
        x, noise = args[:2]
        slope = sum((tuple(args[2:4]) + (1 / 8, 1 / 3)[len(args) - 2 :])[:2]) / 2
        noise.copy_(torch.where(x > 0, 1.0, slope))
        return x * noise  # type: ignore[no-any-return]
    return None
