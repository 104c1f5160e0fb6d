"""Copies as another process would get them: nothing is shared with what was copied."""

import copyreg
import io
import pickle
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pliant.engine.wire import is_plain

T = TypeVar("T")
Block = Tensor | NDArray[Any]

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_OWN_WAYS = {
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__getnewargs__", "__getnewargs_ex__", "__slots__",
}  # fmt: skip
_RECORDS: dict[type[Any], bool] = {}


def copied(value: T) -> T:
    """Return what `decoded(message(value))` returns, without the way through bytes.

    >>> from pliant.engine.copies import copied
    >>> job = {"rows": (1, 2), "lost": []}
    >>> copied(job) == job, copied(job)["lost"] is job["lost"]
    (True, False)
    """
    try:
        found: T = _rebuilt(value, {})
    except _Unknown:
        found = _pickled(value)
    return found


class _Unknown(Exception):
    """Only pickle knows how to copy this."""


def _rebuilt(value: Any, made: dict[int, Any]) -> Any:
    """Copy containers, tensors and plain dataclasses piece by piece: what was one stays one."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    key = id(value)
    if key in made:
        return made[key]
    found: Any
    if kind is Tensor or kind is np.ndarray:
        found = _block(value)
    elif kind is tuple:
        found = tuple([_rebuilt(each, made) for each in value])
    elif kind is list:
        found = made[key] = []
        found.extend([_rebuilt(each, made) for each in value])
    elif kind is dict:
        found = made[key] = {}
        for name, each in value.items():
            found[_rebuilt(name, made)] = _rebuilt(each, made)
    elif _is_record(kind):
        found = made[key] = object.__new__(kind)
        fields = vars(found)
        for name, each in vars(value).items():
            fields[name] = _rebuilt(each, made)
    else:
        raise _Unknown
    made[key] = found
    return found


def _block(value: Any) -> Block:
    if isinstance(value, Tensor):
        if not is_plain(value):
            raise _Unknown
        return value.clone()
    if value.dtype.hasobject:
        raise _Unknown
    own: NDArray[Any] = value.copy(order="K")
    return own


def _is_record(kind: type[Any]) -> bool:
    """Tell whether pickle would do no more than copy the fields of such an object."""
    if kind not in _RECORDS:
        _RECORDS[kind] = (
            is_dataclass(kind)
            and kind not in copyreg.dispatch_table
            and not any(_OWN_WAYS & vars(base).keys() for base in kind.__mro__[:-1])
        )
    return _RECORDS[kind]


def _pickled(value: T) -> T:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    file.seek(0)
    found: T = _Unpickler(file, pickler.aside).load()
    return found


class _Pickler(pickle.Pickler):
    """Pickle all but tensors and arrays, which are laid aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.aside: dict[int, Block] = {}

    def persistent_id(self, value: object) -> int | None:
        if type(value) is Tensor:
            if not is_plain(value):
                return None
        elif type(value) is not np.ndarray or value.dtype.hasobject:
            return None
        self.aside[id(value)] = value
        return id(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, aside: dict[int, Block]) -> None:
        super().__init__(file)
        self._aside = aside
        self._made: dict[int, Block] = {}

    def persistent_load(self, number: int) -> Block:
        if number not in self._made:  # what was one stays one
            self._made[number] = _block(self._aside[number])
        return self._made[number]
