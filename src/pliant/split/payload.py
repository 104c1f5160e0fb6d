"""Encode activations and their gradients as the bytes that are sent."""

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pliant.value import Value

DTYPES = {"float32": "<f4", "float16": "<f2", "int8": "<i1"}


@dataclass(frozen=True)
class Message:
    """A client's activations and labels of one mini-batch."""

    shape: tuple[int, ...]
    body: bytes
    labels: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.labels)


class Payload(Value, frozen=True):
    """An encoding of tensors: a number type, and all entries or a bitmap and the nonzero ones.

    An int8 tensor is preceded by its scale.

    >>> import torch
    >>> from pliant.split.payload import Payload
    >>> Payload(zeros="bitmap").encode(torch.tensor([0.0, 0.0, 0.0, 1.0])).hex()
    '100000803f'
    >>> Payload(zeros="bitmap").decode(bytes.fromhex("100000803f"), (4,)).tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    zeros: Literal["sent", "bitmap"] = "bitmap"
    dtype: Literal["float32", "float16", "int8"] = "float32"

    def encode(self, tensor: Tensor) -> bytes:
        """Encode a tensor of floats."""
        flat = tensor.detach().reshape(-1).to(torch.float32).contiguous().numpy()
        head = b""
        if self.zeros == "bitmap":
            is_nonzero = flat != 0
            head, flat = np.packbits(is_nonzero).tobytes(), flat[is_nonzero]
        if self.dtype == "int8":
            with np.errstate(invalid="ignore", over="ignore"):
                scale = np.float32(np.abs(flat).max(initial=0.0) / np.float32(127))
                steps = np.rint(flat / (scale or np.float32(1)))
                values = np.nan_to_num(steps).astype("<i1")
            return bytes(head + scale.astype("<f4").tobytes() + values.tobytes())
        with np.errstate(over="ignore"):
            return bytes(head + flat.astype(DTYPES[self.dtype]).tobytes())

    def decode(self, body: bytes, shape: tuple[int, ...]) -> Tensor:
        """Decode a tensor of this shape; raise `ValueError` if the bytes do not fit it."""
        entries, start = prod(shape), 0
        width = np.dtype(DTYPES[self.dtype]).itemsize
        count, is_nonzero = entries, None
        if self.zeros == "bitmap":
            start = -(-entries // 8)
            bits = np.unpackbits(np.frombuffer(body[:start], np.uint8))
            if len(body) < start or bits[entries:].any():
                raise ValueError(f"a bitmap of {entries} bits, got {8 * min(len(body), start)}")
            is_nonzero = bits[:entries].astype(np.bool_)
            count = int(is_nonzero.sum())
        scale = np.float32(1)
        if self.dtype == "int8":
            scale = np.frombuffer(body[start : start + 4].ljust(4, b"\0"), "<f4")[0]
            start += 4
        if len(body) != start + count * width:
            raise ValueError(f"{start + count * width} bytes, got {len(body)}")
        values = np.frombuffer(body, DTYPES[self.dtype], count, start).astype(np.float32)
        if self.dtype == "int8":
            values = values * scale
        if is_nonzero is None:
            return torch.from_numpy(values).reshape(shape)
        dense = np.zeros(entries, np.float32)
        dense[is_nonzero] = values
        return torch.from_numpy(dense).reshape(shape)

    def dense_size(self, entries: int) -> int:
        """Return the number of bytes of a tensor without zeros."""
        width = np.dtype(DTYPES[self.dtype]).itemsize
        bitmap = -(-entries // 8) if self.zeros == "bitmap" else 0
        return bitmap + (4 if self.dtype == "int8" else 0) + entries * width


def get_label_dtype(classes: int) -> str:
    """Return the smallest integer type that holds the labels."""
    return "<u1" if classes <= 256 else "<u4"


def encode_labels(labels: Tensor, classes: int) -> bytes:
    return labels.numpy().astype(get_label_dtype(classes)).tobytes()


def decode_labels(raw: bytes, classes: int) -> Tensor:
    """Decode labels; raise `ValueError` if their length is odd."""
    dtype = np.dtype(get_label_dtype(classes))
    if len(raw) % dtype.itemsize:
        raise ValueError(f"labels of {dtype.itemsize} bytes each, got {len(raw)} bytes")
    return torch.from_numpy(np.frombuffer(raw, dtype).astype(np.int64))
