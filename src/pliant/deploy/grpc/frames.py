"""The messages of split learning on a gRPC stream.

The server numbers its requests, and every request gets exactly one reply. Numbers start at 1 in
each *epoch*, which lasts from one restore of a device's part by the server to the next.
"""

from typing import Any, Literal

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from pliant.split.client import BatchRequest

PROTOCOL_VERSION = 3
RequestKind = Literal["restore", "ask", "learn", "drop", "take", "forget", "params", "state"]
ACTIVATIONS, LABELS, GRADIENT = "body", "labels", "slope"


class FrameHeader(Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """The header of every frame."""


class Hello(FrameHeader, frozen=True, tag="hello"):
    """A device names itself and its process, which stays the same after a broken stream."""

    device: int
    process: str = ""
    version: int = PROTOCOL_VERSION


class Challenge(FrameHeader, frozen=True, tag="challenge"):
    """The server requests a signature."""

    nonce: bytes
    federation_name: str


class Proof(FrameHeader, frozen=True, tag="proof"):
    """A device's signature; empty without keys."""

    signature: bytes


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


class RunFinished(FrameHeader, frozen=True, tag="bye"):
    """The run is over."""


ServerHeader = Challenge | SplitRunConfig | SplitRequest | RunFinished
DeviceHeader = Hello | Proof | Ready | SplitReply


def bytes_to_tensor(raw: bytes) -> Tensor:
    """Wrap bytes in a tensor, which safetensors can carry."""
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy())


def tensor_to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
