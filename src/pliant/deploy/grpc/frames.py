"""The messages of split learning on a gRPC stream.

The server numbers its requests, and every request gets exactly one reply. Numbers start at 1 in
each *epoch*, which lasts from one restore of a device's part by the server to the next.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from pliant.data.declared import DataDeclaration
from pliant.split.client import BatchRequest
from pliant.split.session import Session

RequestKind = Literal[
    "restore", "ask", "learn", "drop", "take", "forget", "params", "state", "declare"
]
MESSAGE_OVERHEAD = 1_000_000  # bytes allowed beyond the tensors
ACTIVATIONS, LABELS, GRADIENT = "body", "labels", "slope"


class FrameHeader(Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """The header of every frame."""


class SplitRunConfig(FrameHeader, frozen=True, tag="welcome"):
    """The server describes the run and names the current epoch."""

    epoch: str
    experiment: Any  # as `pliant.value.encode` returns it


class Ready(FrameHeader, frozen=True, tag="ready"):
    """A device is set up and resumes after the last request that it has completed."""

    epoch: str
    done_up_to: int


class SplitRequest(FrameHeader, frozen=True, tag="question"):
    """A request to a device."""

    number: int
    kind: RequestKind
    received_up_to: int = 0  # the server has the replies up to this number
    batch: BatchRequest | None = None


class SplitReply(FrameHeader, frozen=True, tag="answer"):
    """A device's reply to one request."""

    number: int
    saved_up_to: int  # the device's disk has the results up to this number
    seconds: float = 0.0  # spent on the mini-batch that ends here
    shape: tuple[int, ...] = ()  # of the activations
    declaration: DataDeclaration | None = None  # of a device with its own data


class RunFinished(FrameHeader, frozen=True, tag="bye"):
    """The run is over."""


ServerHeader = SplitRunConfig | SplitRequest | RunFinished
DeviceHeader = Ready | SplitReply


def find_max_message_bytes(session: Session, state_bytes: int) -> int:
    """Return the size that no valid frame of a session exceeds."""
    activations = session.local.batch * math.prod(session.activation_shape)
    return 2 * max(state_bytes, session.payload.dense_size(activations)) + MESSAGE_OVERHEAD


def bytes_to_tensor(raw: bytes) -> Tensor:
    """Wrap bytes in a tensor, which safetensors can carry."""
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy())


def tensor_to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
