"""Copy values as sending them to another process would, sharing nothing with the original."""

import copyreg
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from pliant.workers.serialisation import deserialise, is_plain_tensor, serialise

T = TypeVar("T")

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_PICKLE_HOOKS = {
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__getnewargs__", "__getnewargs_ex__", "__slots__",
}  # fmt: skip


def copy_isolated(value: T) -> T:
    """Return the same as `deserialise(serialise(value))`, without going through bytes if possible.

    >>> from pliant.workers.isolated_copy import copy_isolated
    >>> job = {"rows": (1, 2), "lost": []}
    >>> copy_isolated(job) == job, copy_isolated(job)["lost"] is job["lost"]
    (True, False)
    """
    try:
        copy: T = _copy_value(value, {})
    except _NeedsPickle:
        copy = deserialise(serialise(value))
    return copy


class _NeedsPickle(Exception):
    """Only pickle can copy this value."""


def _copy_value(value: Any, copies: dict[int, Any]) -> Any:
    """Copy containers, tensors and plain dataclasses, each object once."""
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    key = id(value)
    if key in copies:
        return copies[key]
    copy: Any
    if kind is Tensor and is_plain_tensor(value):
        copy = value.clone()
    elif kind is np.ndarray and not value.dtype.hasobject:
        copy = value.copy(order="K")
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


@cache
def _is_plain_dataclass(kind: type[Any]) -> bool:
    """Return whether pickle would only copy the fields of such an object."""
    return (
        is_dataclass(kind)
        and kind not in copyreg.dispatch_table
        and not any(_PICKLE_HOOKS & vars(base).keys() for base in kind.__mro__[:-1])
    )
