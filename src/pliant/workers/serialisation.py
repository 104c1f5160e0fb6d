"""Serialise any picklable value for another process, with tensors as raw buffers.

A message is a header (size of the pickle, number of buffers, size of each buffer), the pickle, and
the buffers. Buffers are aligned to 64 bytes, as torch allocates them, and strides are kept, because
both can change the rounding of a matrix product.
"""

import copyreg
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache, partial
from operator import is_
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pliant.value import Value

ALIGNMENT = 64

_IMMUTABLE = frozenset({int, float, complex, bool, str, bytes, type(None)})
_PICKLE_HOOKS = {
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__getnewargs__", "__getnewargs_ex__", "__slots__",
}  # fmt: skip

Chunk = bytes | memoryview
T = TypeVar("T")


def serialise_chunks(value: object) -> list[Chunk]:
    """Encode a value as chunks that, joined, make one message."""
    buffers: list[memoryview] = []
    body = io.BytesIO()
    pickler = pickle.Pickler(
        body, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())
    )
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    sizes = [buffer.nbytes for buffer in buffers]
    header = struct.pack(f"<{2 + len(sizes)}Q", body.tell(), len(sizes), *sizes)
    padding = bytes(-(len(header) + body.tell()) % ALIGNMENT)
    chunks: list[Chunk] = [header, body.getbuffer(), padding]
    for buffer in buffers:
        chunks += (buffer, bytes(-buffer.nbytes % ALIGNMENT))
    return chunks


def serialise(value: object) -> bytes:
    """Encode a value as one message."""
    return b"".join(serialise_chunks(value))


def deserialise(buffer: Any, *, copy: bool = True) -> Any:
    """Decode a message; without `copy` its tensors are views of `buffer`, which must be writable.

    >>> from pliant.workers.serialisation import deserialise, serialise
    >>> deserialise(serialise({"device": 7}))
    {'device': 7}
    """
    message = memoryview(buffer).cast("B")
    length, count = struct.unpack_from("<2Q", message)
    sizes = struct.unpack_from(f"<{count}Q", message, 16)
    start = 16 + 8 * count
    body = message[start : start + length]
    return pickle.loads(body, buffers=_iter_buffers(message, start + length, sizes, copy))


def _iter_buffers(
    message: memoryview, end: int, sizes: tuple[int, ...], copy: bool
) -> Iterator[memoryview]:
    for size in sizes:
        start = end + -end % ALIGNMENT
        end = start + size
        buffer = message[start:end]
        if copy:  # separately, so that keeping a small tensor does not keep the whole message
            array = torch.empty(size, dtype=torch.uint8).numpy()
            array[:] = np.frombuffer(buffer, np.uint8)
            buffer = array.data
        yield buffer


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is plain CPU memory: dense, detached, without lazy conjugation."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def make_copier(params: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Return a function that copies these tensors, for many copies of the same.

    >>> import torch
    >>> from pliant.workers.serialisation import make_copier
    >>> weights = {"weight": torch.zeros(1)}
    >>> copy = make_copier(weights)()
    >>> copy, copy["weight"] is weights["weight"]
    ({'weight': tensor([0.])}, False)
    """
    tensors = params.values()
    if len(set(map(id, tensors))) == len(params) and all(
        type(tensor) is Tensor and is_plain_tensor(tensor) for tensor in tensors
    ):
        return lambda: {name: tensor.clone() for name, tensor in params.items()}
    return partial(copy_isolated, params)


def copy_isolated(value: T) -> T:
    """Return the same as `deserialise(serialise(value))`, but clone tensors directly.

    >>> from pliant.workers.serialisation import copy_isolated
    >>> job = {"rows": (1, 2), "lost": []}
    >>> copy_isolated(job) == job, copy_isolated(job)["lost"] is job["lost"]
    (True, False)
    """
    try:
        copy: T = _copy_plain(value, {})
    except _NeedsPickle:
        copy = _copy_by_pickle(value)
    return copy


class _NeedsPickle(Exception):
    """Only pickle knows how to copy this value."""


def _copy_plain(value: Any, copies: dict[int, Any]) -> Any:
    """Copy tensors, arrays, dicts, tuples and dataclasses: what jobs and results consist of."""
    kind: Any = type(value)
    key = id(value)
    if key in copies:  # an object that occurs twice is copied once
        return copies[key]
    copy: Any
    if kind is Tensor and is_plain_tensor(value):  # the most frequent first
        copy = value.clone()
    elif kind is dict and _is_flat(value):
        copy = copies[key] = {}  # before its items, which may contain it
        _copy_items(value, copy, copies)
    elif kind is tuple:
        if _is_flat(value):
            return value
        items = [_copy_plain(item, copies) for item in value]
        copy = value if all(map(is_, items, value)) else tuple(items)
    elif kind in _IMMUTABLE or isinstance(value, Value):
        return value
    elif kind is np.ndarray and not value.dtype.hasobject:
        is_constant = value.base is None and not value.flags.writeable
        copy = value if is_constant else value.copy(order="K")
    elif _is_plain_dataclass(kind):
        fields = vars(value)
        is_frozen = kind.__dataclass_params__.frozen
        if is_frozen and _is_flat(fields.values()):
            return value
        copy = copies[key] = object.__new__(kind)
        _copy_items(fields, vars(copy), copies)
        if is_frozen and all(map(is_, vars(copy).values(), fields.values())):
            copy = value
    else:
        raise _NeedsPickle
    copies[key] = copy
    return copy


def _is_flat(items: Iterable[Any]) -> bool:
    return _IMMUTABLE.issuperset(map(type, items))


def _copy_items(source: dict[Any, Any], target: dict[Any, Any], copies: dict[int, Any]) -> None:
    for name, item in source.items():
        target[name] = item if type(item) in _IMMUTABLE else _copy_plain(item, copies)


@cache
def _is_plain_dataclass(kind: type[Any]) -> bool:
    """Return whether pickle would only copy the fields of such an object."""
    return (
        is_dataclass(kind)
        and kind not in copyreg.dispatch_table
        and not any(_PICKLE_HOOKS & vars(base).keys() for base in kind.__mro__[:-1])
    )


def _copy_by_pickle(value: T) -> T:
    clones: dict[int, Tensor] = {}

    def clone_tensor(item: Any) -> int | None:
        if type(item) is not Tensor or not is_plain_tensor(item):
            return None  # pickled as usual
        if id(item) not in clones:
            clones[id(item)] = item.clone()
        return id(item)

    body = io.BytesIO()
    pickler = pickle.Pickler(body, protocol=5)
    pickler.persistent_id = clone_tensor  # type: ignore[method-assign] # as documented
    pickler.dump(value)
    body.seek(0)
    unpickler = pickle.Unpickler(body)
    unpickler.persistent_load = clones.__getitem__  # type: ignore[method-assign] # as documented
    copy: T = unpickler.load()
    return copy


def _reduce_tensor(tensor: Tensor) -> Any:
    if not is_plain_tensor(tensor):
        untyped: Any = tensor  # torch does not annotate this method
        return untyped.__reduce_ex__(5)
    flat = tensor
    if not tensor.is_contiguous():
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        flat = tensor.permute(order)
        if not flat.is_contiguous():  # gaps or overlaps
            flat = tensor = tensor.contiguous()
    raw = flat.view(-1).view(torch.uint8).numpy().data
    layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    return _rebuild_tensor, (pickle.PickleBuffer(raw), *layout)


def _rebuild_tensor(
    buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    if not len(buffer):  # frombuffer refuses an empty buffer
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)


_REDUCERS = copyreg.dispatch_table | {Tensor: _reduce_tensor}
