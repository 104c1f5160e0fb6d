"""Shapes of common operations on meta tensors, without torch's own rules for them.

Torch's rules are written in Python; the first that is used imports a compiler, which takes longer
than all else at the start of a run. Here are the ordinary cases of what most networks consist of.
Whatever is not ordinary, and whatever is wrong, is left to torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Shadow(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not annotate it
    """Let operations on meta tensors give tensors of the right shape at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch would import its compiler to tell it so
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(func)
        found = rule(*args) if rule is not None and not kwargs else None
        return func(*args, **(kwargs or {})) if found is None else found


def _same(x: Tensor, *options: Any) -> Tensor | None:
    return _made(x, x.shape) if _is_ordinary(x) else None


def _itself(x: Tensor, *options: Any) -> Tensor | None:
    return x if _is_ordinary(x) else None


def _joined(x: Any, y: Any) -> Tensor | None:
    """Add or multiply."""
    if not _is_ordinary(x):
        return None
    if type(y) in (int, float):
        return _made(x, x.shape)
    if not _is_ordinary(y) or x.dtype != y.dtype or x.shape != y.shape:
        return None
    return _made(x, x.shape)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor | None:
    window = weight.shape[2:]
    fits = (
        _is_ordinary(x)
        and _is_ordinary(weight)
        and not transposed
        and x.dtype == weight.dtype
        and x.dim() == weight.dim()
        and x.shape[1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and (bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype))
        and len(stride) == len(padding) == len(dilation) == len(window)
    )
    sides = _sides(x.shape[2:], window, stride, padding, dilation) if fits else None
    return None if sides is None else _made(x, (x.shape[0], weight.shape[0], *sides))


def _max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), *options: Any
) -> tuple[Tensor, Tensor] | None:
    usual: tuple[Any, ...] = ((0, 0), (1, 1), False)
    padding, dilation, ceiled = options + usual[len(options) :]
    found = _pooled(x, kernel, stride, padding, dilation, ceiled)
    return None if found is None else (found, _made(found, found.shape, torch.int64))


def _average_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), *options: Any
) -> Tensor | None:
    usual: tuple[Any, ...] = ((0, 0), False)
    padding, ceiled = (options + usual[len(options) :])[:2]
    return _pooled(x, kernel, stride, padding, (1, 1), ceiled)


def _pooled(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceiled: bool,
) -> Tensor | None:
    stride = stride or kernel
    given = (kernel, stride, padding, dilation)
    if ceiled or not _is_ordinary(x) or x.dim() != 4 or any(len(each) != 2 for each in given):
        return None
    if any(2 * space > size for space, size in zip(padding, kernel, strict=True)):
        return None
    sides = _sides(x.shape[2:], kernel, stride, padding, dilation)
    return None if sides is None else _made(x, (*x.shape[:2], *sides))


def _sides(
    sizes: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int] | None:
    every = zip(sizes, window, stride, padding, dilation, strict=True)
    found = [(s + 2 * p - d * (w - 1) - 1) // t + 1 for s, w, t, p, d in every if t > 0 and w > 0]
    return found if len(found) == len(sizes) and min(found, default=0) > 0 else None


def _product(a: Tensor, b: Tensor) -> Tensor | None:
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    return _made(a, (a.shape[0], b.shape[1])) if fits and _is_ordinary(a) else None


def _affine(bias: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    fits = bias.shape == b.shape[1:] and bias.dtype == a.dtype
    return _product(a, b) if fits else None


def _batch_norm(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    if not _is_ordinary(x) or x.dim() < 2 or not options[4]:  # only with the batch's own statistics
        return None
    given = [each for each in options[:4] if each is not None]
    if any(each.shape != x.shape[1:2] or each.dtype != x.dtype for each in given):
        return None
    return _made(x, x.shape), _made(x, x.shape[1:2]), _made(x, x.shape[1:2])


def _concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = parts[0]
    shapes = np.array([part.shape for part in parts if part.dim() == first.dim()])
    if len(shapes) != len(parts) or not first.dim() or not -first.dim() <= dim < first.dim():
        return None
    rest = np.delete(shapes, dim % first.dim(), axis=1)
    is_alike = all(_is_ordinary(part) and part.dtype == first.dtype for part in parts)
    if not is_alike or (rest != rest[0]).any():
        return None
    whole = list(first.shape)
    whole[dim] = int(shapes[:, dim].sum())
    return _made(first, whole)


def _mean(x: Tensor, dims: Sequence[int] | None, keeps: bool = False) -> Tensor | None:
    if not _is_ordinary(x) or not dims or any(not -x.dim() <= dim < x.dim() for dim in dims):
        return None
    gone = {dim % x.dim() for dim in dims}
    if len(gone) != len(dims):
        return None
    kept = ((1 if place in gone else size) for place, size in enumerate(x.shape))
    left = (size for place, size in enumerate(x.shape) if place not in gone)
    return _made(x, tuple(kept if keeps else left))


def _counted(x: Tensor, more: Any) -> Tensor | None:
    """Count a batch, as norm layers do."""
    return x if x.device.type == "meta" and type(more) is int else None


def _made(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def _is_ordinary(x: Any) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "meta"
        and x.dtype in (torch.float32, torch.float64)
        and x.is_contiguous()
        and x.numel() > 0
    )


_RULES: dict[Any, Callable[..., Any]] = {
    aten.relu.default: _same,
    aten.sigmoid.default: _same,
    aten.tanh.default: _same,
    aten.silu.default: _same,
    aten.hardswish.default: _same,
    aten.hardsigmoid.default: _same,
    aten.hardtanh.default: _same,
    aten.relu_.default: _itself,
    aten.silu_.default: _itself,
    aten.hardswish_.default: _itself,
    aten.hardtanh_.default: _itself,
    aten.add_.Tensor: _counted,
    aten.add.Tensor: _joined,
    aten.mul.Tensor: _joined,
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.avg_pool2d.default: _average_pool,
    aten.mm.default: _product,
    aten.addmm.default: _affine,
    aten.native_batch_norm.default: _batch_norm,
    aten.cat.default: _concatenated,
    aten.mean.dim: _mean,
}
