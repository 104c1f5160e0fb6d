"""Traced values that know their shape."""

import operator
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import fx


class TracedShape(tuple[Any, ...]):
    """A torch.Size that may contain a traced batch size."""

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return TracedShape(item) if isinstance(index, slice) else item

    def numel(self) -> Any:
        return prod(self)


class ShapedProxy(fx.Proxy):
    """A traced value with a known shape, except for the batch size."""

    is_nested = False

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if orig_method is torch.is_floating_point and isinstance(args[0], ShapedProxy):
            return args[0].dtype.is_floating_point
        return super().__torch_function__(orig_method, types, args, kwargs)

    @property
    def shape(self) -> tuple[Any, ...]:
        return TracedShape(map(self.size, range(self.ndim)))

    @property
    def ndim(self) -> int:
        return int(self.value.dim())

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype  # type: ignore[no-any-return] # the meta value is Any

    @property
    def device(self) -> torch.device:
        return self.tracer.input_device  # type: ignore[attr-defined,no-any-return] # always a ShapedTracer

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def requires_grad(self) -> bool:
        return bool(self.node.meta["requires_grad"])

    @property
    def value(self) -> Any:
        return self.tracer.compute_value(self.node)  # type: ignore[attr-defined] # a ShapedTracer

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return self.shape
        size = self.value.size(dim)
        if self.tracer.is_batch(size):  # type: ignore[attr-defined] # always a ShapedTracer
            return self.tracer.create_proxy("call_method", "size", (self, dim), {})
        return size

    def numel(self) -> Any:
        return prod(self.shape)

    def __len__(self) -> int:
        value = self.value
        return len(value) if isinstance(value, tuple | list) else int(self._refuse("len()"))

    def __iter__(self) -> Iterator[Any]:
        return (operator.getitem(self, index) for index in range(len(self)))

    def __index__(self) -> int:
        return int(self._refuse("a batch size or a value used as a number"))

    __int__ = __index__

    def item(self) -> Any:
        return self._refuse("a value used as a number")

    tolist = item

    def __float__(self) -> float:
        return float(self._refuse("a value used as a number"))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.refuse_assignment()  # type: ignore[attr-defined] # always a ShapedTracer

    def _refuse(self, problem: str) -> Any:
        return self.tracer.refuse(problem)  # type: ignore[attr-defined] # always a ShapedTracer


def _make_in_place_method(name: str) -> Callable[[Any, Any], Any]:
    target = getattr(operator, name)

    def method(self: ShapedProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(ShapedProxy, f"__{_name}__", _make_in_place_method(_name))
