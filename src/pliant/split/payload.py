"""Payloads: how activations and their gradients travel, as bytes that are really made and read."""

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pliant.value import Value

NUMBERS = {"float32": "<f4", "float16": "<f2", "int8": "<i1"}


@dataclass(frozen=True)
class Message:
    """What a client sends for one mini-batch: its activations and their labels."""

    shape: tuple[int, ...]
    body: bytes
    labels: bytes

    @property
    def size(self) -> int:
        """Return how many bytes travel."""
        return len(self.body) + len(self.labels)


class Payload(Value, frozen=True):
    """How a tensor is written down: all of it, or a bitmap and what is not zero; and in what.

    int8 has one scale for the tensor, in front of it.

    >>> import torch
    >>> from pliant.split.payload import Payload
    >>> Payload(zeros="bitmap").encode(torch.tensor([0.0, 0.0, 0.0, 1.0])).hex()
    '100000803f'
    >>> Payload(zeros="bitmap").decode(bytes.fromhex("100000803f"), (4,)).tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    zeros: Literal["sent", "bitmap"] = "bitmap"
    number: Literal["float32", "float16", "int8"] = "float32"

    def encode(self, tensor: Tensor) -> bytes:
        """Write a tensor of floats."""
        flat = tensor.detach().reshape(-1).to(torch.float32).contiguous().numpy()
        head = b""
        if self.zeros == "bitmap":
            is_there = flat != 0
            head, flat = np.packbits(is_there).tobytes(), flat[is_there]
        if self.number == "int8":
            with np.errstate(invalid="ignore", over="ignore"):
                scale = np.float32(np.abs(flat).max(initial=0.0) / np.float32(127))
                steps = np.rint(flat / (scale or np.float32(1)))
                written = np.nan_to_num(steps).astype("<i1")
            return bytes(head + scale.astype("<f4").tobytes() + written.tobytes())
        with np.errstate(over="ignore"):
            return bytes(head + flat.astype(NUMBERS[self.number]).tobytes())

    def decode(self, body: bytes, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of this shape, or raise ValueError if these are not its bytes."""
        entries, start = prod(shape), 0
        width = np.dtype(NUMBERS[self.number]).itemsize
        count, is_there = entries, None
        if self.zeros == "bitmap":
            start = -(-entries // 8)
            bits = np.unpackbits(np.frombuffer(body[:start], np.uint8))
            if len(body) < start or bits[entries:].any():
                raise ValueError(f"a bitmap of {entries} bits, got {8 * min(len(body), start)}")
            is_there = bits[:entries].astype(np.bool_)
            count = int(is_there.sum())
        scale = np.float32(1)
        if self.number == "int8":
            scale = np.frombuffer(body[start : start + 4].ljust(4, b"\0"), "<f4")[0]
            start += 4
        if len(body) != start + count * width:
            raise ValueError(f"{start + count * width} bytes, got {len(body)}")
        values = np.frombuffer(body, NUMBERS[self.number], count, start).astype(np.float32)
        if self.number == "int8":
            values = values * scale
        if is_there is None:
            return torch.from_numpy(values).reshape(shape)
        dense = np.zeros(entries, np.float32)
        dense[is_there] = values
        return torch.from_numpy(dense).reshape(shape)

    def dense(self, entries: int) -> int:
        """Return the bytes of a tensor without a zero."""
        width = np.dtype(NUMBERS[self.number]).itemsize
        bitmap = -(-entries // 8) if self.zeros == "bitmap" else 0
        return bitmap + (4 if self.number == "int8" else 0) + entries * width


def label_type(classes: int) -> str:
    """Return the smallest type that holds the labels."""
    return "<u1" if classes <= 256 else "<u4"


def write_labels(labels: Tensor, classes: int) -> bytes:
    """Write labels down."""
    return labels.numpy().astype(label_type(classes)).tobytes()


def read_labels(raw: bytes, classes: int) -> Tensor:
    """Read labels, or raise ValueError."""
    kind = np.dtype(label_type(classes))
    if len(raw) % kind.itemsize:
        raise ValueError(f"labels of {kind.itemsize} bytes each, got {len(raw)} bytes")
    return torch.from_numpy(np.frombuffer(raw, kind).astype(np.int64))
