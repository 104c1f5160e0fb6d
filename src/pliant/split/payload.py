"""Encode activations and their gradients as the bytes that are sent.

Feature columns are left out by the rule of SplitFC, Oh et al., arXiv 2307.10805: those that differ
least between the images of a mini-batch.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
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

    An int8 tensor is preceded by its scale. With `columns` below 1, a bitmap of the features comes
    first, and only this share of them is sent.

    >>> import torch
    >>> from pliant.split.payload import Payload
    >>> Payload(zeros="bitmap").encode(torch.tensor([0.0, 0.0, 0.0, 1.0])).hex()
    '100000803f'
    >>> Payload(zeros="bitmap").decode(bytes.fromhex("100000803f"), (4,)).tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    zeros: Literal["sent", "bitmap"] = "bitmap"
    dtype: Literal["float32", "float16", "int8"] = "float32"
    columns: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0  # share of features, by their deviation

    def encode(self, tensor: Tensor, is_sent: Tensor | None = None) -> bytes:
        """Encode a tensor of floats; `is_sent` chooses the features instead of their deviation."""
        if self.columns == 1.0:
            return self._encode_entries(tensor)
        matrix = tensor.detach().flatten(1)
        if is_sent is None:
            is_sent = self._choose_columns(matrix)
        bits = np.packbits(is_sent.numpy()).tobytes()
        return bits + self._encode_entries(matrix[:, is_sent])

    def decode(self, body: bytes, shape: tuple[int, ...]) -> Tensor:
        """Decode a tensor of this shape; raise `ValueError` if the bytes do not fit it."""
        is_sent = self.read_columns(body, shape)
        if is_sent is None:
            return self._decode_entries(body, shape)
        matrix = torch.zeros(shape[0], len(is_sent))
        count, start = int(is_sent.sum()), -(-len(is_sent) // 8)
        matrix[:, is_sent] = self._decode_entries(body[start:], (shape[0], count))
        return matrix.reshape(shape)

    def read_columns(self, body: bytes, shape: tuple[int, ...]) -> Tensor | None:
        """Return which features of a tensor were sent; None if all are."""
        if self.columns == 1.0:
            return None
        is_sent = torch.from_numpy(_read_bits(body, prod(shape[1:])))
        expected, count = self._count_columns(len(is_sent)), int(is_sent.sum())
        if count != expected:
            raise ValueError(f"{expected} of {len(is_sent)} features, got {count}")
        return is_sent

    def _choose_columns(self, matrix: Tensor) -> Tensor:
        is_sent = torch.zeros(matrix.shape[1], dtype=torch.bool)
        deviations = matrix.double().std(dim=0, correction=0)
        order = torch.sort(deviations, descending=True, stable=True).indices
        is_sent[order[: self._count_columns(matrix.shape[1])]] = True
        return is_sent

    def _count_columns(self, features: int) -> int:
        return ceil(self.columns * features - 1e-9)

    def _encode_entries(self, tensor: Tensor) -> bytes:
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

    def _decode_entries(self, body: bytes, shape: tuple[int, ...]) -> Tensor:
        entries, start = prod(shape), 0
        width = np.dtype(DTYPES[self.dtype]).itemsize
        count, is_nonzero = entries, None
        if self.zeros == "bitmap":
            start = -(-entries // 8)
            is_nonzero = _read_bits(body, entries)
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

    def dense_size(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of a tensor without zeros."""
        bits, entries = 0, prod(shape)
        if self.columns < 1.0:
            features = prod(shape[1:])
            bits, entries = -(-features // 8), shape[0] * self._count_columns(features)
        width = np.dtype(DTYPES[self.dtype]).itemsize
        bitmap = -(-entries // 8) if self.zeros == "bitmap" else 0
        return bits + bitmap + (4 if self.dtype == "int8" else 0) + entries * width


def _read_bits(body: bytes, count: int) -> NDArray[np.bool_]:
    size = -(-count // 8)
    bits = np.unpackbits(np.frombuffer(body[:size], np.uint8))
    if len(body) < size or bits[count:].any():
        raise ValueError(f"a bitmap of {count} bits, got {8 * min(len(body), size)}")
    return bits[:count].astype(np.bool_)


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
