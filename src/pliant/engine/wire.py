"""Messages between processes: any picklable value as one run of bytes, tensors as they lie.

A message is a head (how many bytes of pickle, how many buffers, each buffer's size), the pickle,
and the buffers, each on a multiple of 64 bytes as torch allocates: the same alignment everywhere,
because a matrix product may round by it. The strides of a tensor survive, for the same reason.
"""

import copyreg
import io
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64

Piece = bytes | memoryview


def pieces(value: object) -> list[Piece]:
    """Encode a value as pieces that make one message when they are joined."""
    buffers: list[memoryview] = []
    body = io.BytesIO()
    pickler = pickle.Pickler(
        body, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())
    )
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    sizes = [buffer.nbytes for buffer in buffers]
    head = struct.pack(f"<{2 + len(sizes)}Q", body.tell(), len(sizes), *sizes)
    found: list[Piece] = [head, body.getbuffer(), bytes(-(len(head) + body.tell()) % ALIGNMENT)]
    for buffer in buffers:
        found += (buffer, bytes(-buffer.nbytes % ALIGNMENT))
    return found


def message(value: object) -> bytes:
    """Encode a value as one message."""
    return b"".join(pieces(value))


def decoded(source: Any, *, copies: bool = True) -> Any:
    """Decode a message; without copies its tensors lie in `source` itself, which must be writable.

    >>> from pliant.engine.wire import decoded, message
    >>> decoded(message({"device": 7}))
    {'device': 7}
    """
    whole = memoryview(source).cast("B")
    length, count = struct.unpack_from("<2Q", whole)
    sizes = struct.unpack_from(f"<{count}Q", whole, 16)
    start = 16 + 8 * count
    body = whole[start : start + length]
    return pickle.loads(body, buffers=_buffers(whole, start + length, sizes, copies))


def _buffers(
    whole: memoryview, end: int, sizes: tuple[int, ...], copies: bool
) -> Iterator[memoryview]:
    for size in sizes:
        start = end + -end % ALIGNMENT
        end = start + size
        part = whole[start:end]
        if copies:  # one buffer each, so that keeping a small tensor does not keep the message
            own = torch.empty(size, dtype=torch.uint8).numpy()
            own[:] = np.frombuffer(part, np.uint8)
            part = own.data
        yield part


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is numbers in this machine's memory and nothing else."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _reduced(tensor: Tensor) -> Any:
    if not is_plain(tensor):
        ordinary: Any = tensor  # torch does not annotate this method
        return ordinary.__reduce_ex__(5)
    flat = tensor
    if not tensor.is_contiguous():
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        flat = tensor.permute(order)
        if not flat.is_contiguous():  # it has gaps or overlaps
            flat = tensor = tensor.contiguous()
    raw = flat.view(-1).view(torch.uint8).numpy().data
    lying = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    return _restored, (pickle.PickleBuffer(raw), *lying)


def _restored(
    buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    if not len(buffer):  # which frombuffer refuses
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)


_REDUCERS = copyreg.dispatch_table | {Tensor: _reduced}
