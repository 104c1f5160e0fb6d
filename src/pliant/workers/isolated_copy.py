"""Copy values as sending them to another process would, sharing nothing with the original."""

import copyreg
import io
import pickle
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pliant.workers.serialisation import is_plain_tensor

T = TypeVar("T")
Block = Tensor | NDArray[Any]

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_PICKLE_HOOKS = {
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__getnewargs__", "__getnewargs_ex__", "__slots__",
}  # fmt: skip
_PLAIN_DATACLASSES: dict[type[Any], bool] = {}


def copy_isolated(value: T) -> T:
    """Return the same as `deserialise(serialise(value))`, without going through bytes.

    >>> from pliant.workers.isolated_copy import copy_isolated
    >>> job = {"rows": (1, 2), "lost": []}
    >>> copy_isolated(job) == job, copy_isolated(job)["lost"] is job["lost"]
    (True, False)
    """
    try:
        copy: T = _copy_value(value, {})
    except _NeedsPickle:
        copy = _copy_by_pickle(value)
    return copy


class _NeedsPickle(Exception):
    """Only pickle can copy this value."""


def _copy_value(value: Any, copies: dict[int, Any]) -> Any:
    """Copy containers, tensors and plain dataclasses, each object once."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    key = id(value)
    if key in copies:
        return copies[key]
    copy: Any
    if kind is Tensor or kind is np.ndarray:
        copy = _copy_block(value)
    elif kind is tuple:
        copy = tuple([_copy_value(item, copies) for item in value])
    elif kind is list:
        copy = copies[key] = []
        copy.extend([_copy_value(item, copies) for item in value])
    elif kind is dict:
        copy = copies[key] = {}
        for name, item in value.items():
            copy[_copy_value(name, copies)] = _copy_value(item, copies)
    elif _is_plain_dataclass(kind):
        copy = copies[key] = object.__new__(kind)
        fields = vars(copy)
        for name, item in vars(value).items():
            fields[name] = _copy_value(item, copies)
    else:
        raise _NeedsPickle
    copies[key] = copy
    return copy


def _copy_block(value: Any) -> Block:
    if isinstance(value, Tensor):
        if not is_plain_tensor(value):
            raise _NeedsPickle
        return value.clone()
    if value.dtype.hasobject:
        raise _NeedsPickle
    array: NDArray[Any] = value.copy(order="K")
    return array


def _is_plain_dataclass(kind: type[Any]) -> bool:
    """Return whether pickle would only copy the fields of such an object."""
    if kind not in _PLAIN_DATACLASSES:
        _PLAIN_DATACLASSES[kind] = (
            is_dataclass(kind)
            and kind not in copyreg.dispatch_table
            and not any(_PICKLE_HOOKS & vars(base).keys() for base in kind.__mro__[:-1])
        )
    return _PLAIN_DATACLASSES[kind]


def _copy_by_pickle(value: T) -> T:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    file.seek(0)
    copy: T = _Unpickler(file, pickler.blocks).load()
    return copy


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors and arrays, which it collects in `blocks`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.blocks: dict[int, Block] = {}

    def persistent_id(self, value: object) -> int | None:
        if type(value) is Tensor:
            if not is_plain_tensor(value):
                return None
        elif type(value) is not np.ndarray or value.dtype.hasobject:
            return None
        self.blocks[id(value)] = value
        return id(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, blocks: dict[int, Block]) -> None:
        super().__init__(file)
        self._blocks = blocks
        self._copies: dict[int, Block] = {}

    def persistent_load(self, number: int) -> Block:
        if number not in self._copies:  # copy each once
            self._copies[number] = _copy_block(self._blocks[number])
        return self._copies[number]
