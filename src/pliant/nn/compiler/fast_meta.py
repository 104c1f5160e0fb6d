"""Fast shape inference for common operations on meta tensors, and a count of their MACs.

Torch's own rules import a compiler on first use, which dominates the start-up time of a run, and so
does its `FlopCounterMode`. This module covers the ordinary cases of the operations in most
networks; torch handles all others, including errors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
Sizes = Sequence[int]


class FastMetaMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not annotate it
    """Use the rules of this module for operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch imports its compiler to ask it
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        result = rule(*args) if rule is not None and not kwargs else None
        return func(*args, **(kwargs or {})) if result is None else result


class MacCounter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not annotate it
    """Count multiplications with additions by torch's formulas."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops = 0

    @property
    def macs(self) -> int:
        return self._flops // 2

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # see `FastMetaMode`
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            formula = flop_registry.get(func._overloadpacket)
            if formula is not None:
                self._flops += int(formula(*args, **kwargs, out_val=result))
        return result


def _infer_elementwise(x: Tensor, *options: Any) -> Tensor | None:
    return _make_meta(x, x.shape) if _is_ordinary(x) else None


def _infer_in_place(x: Tensor, *options: Any) -> Tensor | None:
    return x if _is_ordinary(x) else None


def _infer_binary(x: Any, y: Any) -> Tensor | None:
    is_scalar = type(y) in (int, float)
    if not _is_ordinary(x) or not (is_scalar or _is_ordinary(y)):
        return None
    fits = is_scalar or (x.dtype == y.dtype and x.shape == y.shape)
    return _make_meta(x, x.shape) if fits else None


def _infer_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> Tensor | None:
    stride, padding, dilation, transposed, _, groups = options
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
    return _slide_window(x, weight.shape[0], window, stride, padding, dilation) if fits else None


def _infer_max_pool(
    x: Tensor, kernel: Sizes, stride: Sizes = (), *options: Any
) -> tuple[Tensor, Tensor] | None:
    defaults: tuple[Any, ...] = ((0, 0), (1, 1), False)
    padding, dilation, ceil_mode = options + defaults[len(options) :]
    out = None if ceil_mode else _infer_pool(x, kernel, stride or kernel, padding, dilation)
    return None if out is None else (out, _make_meta(out, out.shape, torch.int64))


def _infer_adaptive_max_pool(x: Tensor, size: Sizes) -> tuple[Tensor, Tensor] | None:
    if not _is_ordinary(x) or x.dim() != 4 or len(size) != 2 or min(size) <= 0:
        return None
    shape = (*x.shape[:2], *size)
    return _make_meta(x, shape), _make_meta(x, shape, torch.int64)


def _infer_average_pool(
    x: Tensor, kernel: Sizes, stride: Sizes = (), *options: Any
) -> Tensor | None:
    defaults: tuple[Any, ...] = ((0, 0), False)
    padding, ceil_mode = (options + defaults[len(options) :])[:2]
    return None if ceil_mode else _infer_pool(x, kernel, stride or kernel, padding, (1, 1))


def _infer_pool(
    x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor | None:
    is_2d = x.dim() == 4 and all(len(p) == 2 for p in (kernel, stride, padding, dilation))
    if not is_2d or not _is_ordinary(x):
        return None
    if any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
        return None
    return _slide_window(x, x.shape[1], kernel, stride, padding, dilation)


def _slide_window(
    x: Tensor, channels: int, window: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor | None:
    dims = zip(x.shape[2:], window, stride, padding, dilation, strict=True)
    sides = [(s + 2 * p - d * (w - 1) - 1) // t + 1 for s, w, t, p, d in dims if t > 0 and w > 0]
    if len(sides) < x.dim() - 2 or min(sides, default=0) <= 0:
        return None
    return _make_meta(x, (x.shape[0], channels, *sides))


def _infer_mm(a: Tensor, b: Tensor) -> Tensor | None:
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    return _make_meta(a, (a.shape[0], b.shape[1])) if fits and _is_ordinary(a) else None


def _infer_addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    fits = bias.shape == b.shape[1:] and bias.dtype == a.dtype
    return _infer_mm(a, b) if fits else None


def _infer_batch_norm(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    if not _is_ordinary(x) or x.dim() < 2 or not options[4]:  # only in training mode
        return None
    tensors = [tensor for tensor in options[:4] if tensor is not None]
    if any(tensor.shape != x.shape[1:2] or tensor.dtype != x.dtype for tensor in tensors):
        return None
    return _make_meta(x, x.shape), _make_meta(x, x.shape[1:2]), _make_meta(x, x.shape[1:2])


def _infer_cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = parts[0]
    shapes = np.array([part.shape for part in parts if part.dim() == first.dim()])
    if len(shapes) != len(parts) or not first.dim() or not -first.dim() <= dim < first.dim():
        return None
    rest = np.delete(shapes, dim % first.dim(), axis=1)
    is_alike = all(_is_ordinary(part) and part.dtype == first.dtype for part in parts)
    if not is_alike or (rest != rest[0]).any():
        return None
    shape = list(first.shape)
    shape[dim] = int(shapes[:, dim].sum())
    return _make_meta(first, shape)


def _infer_mean(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor | None:
    if not _is_ordinary(x) or not dims or any(not -x.dim() <= dim < x.dim() for dim in dims):
        return None
    reduced = {dim % x.dim() for dim in dims}
    if len(reduced) != len(dims):
        return None
    with_ones = ((1 if dim in reduced else size) for dim, size in enumerate(x.shape))
    without = (size for dim, size in enumerate(x.shape) if dim not in reduced)
    return _make_meta(x, tuple(with_ones if keepdim else without))


def _make_meta(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def _is_ordinary(x: Any) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "meta"
        and x.dtype in (torch.float32, torch.float64)
        and x.is_contiguous()
        and x.numel() > 0
    )


_ELEMENTWISE = (
    aten.relu, aten.leaky_relu, aten.sigmoid, aten.tanh, aten.silu,
    aten.hardswish, aten.hardsigmoid, aten.hardtanh,
)  # fmt: skip
_IN_PLACE = (aten.relu_, aten.leaky_relu_, aten.silu_, aten.hardswish_, aten.hardtanh_)
_RULES: dict[Any, Callable[..., Any]] = {
    **{function.default: _infer_elementwise for function in _ELEMENTWISE},
    **{function.default: _infer_in_place for function in _IN_PLACE},
    aten.add.Tensor: _infer_binary,
    aten.mul.Tensor: _infer_binary,
    aten.convolution.default: _infer_convolution,
    aten.max_pool2d_with_indices.default: _infer_max_pool,
    aten.adaptive_max_pool2d.default: _infer_adaptive_max_pool,
    aten.avg_pool2d.default: _infer_average_pool,
    aten.mm.default: _infer_mm,
    aten.addmm.default: _infer_addmm,
    aten.native_batch_norm.default: _infer_batch_norm,
    aten.cat.default: _infer_cat,
    aten.mean.dim: _infer_mean,
}
