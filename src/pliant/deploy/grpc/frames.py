"""The messages of split learning on a gRPC stream.

The server numbers its requests, and every request gets exactly one reply. Numbers start at 1 in
each *epoch*, which starts when the server lets a device restore a part that it has kept.
"""

from typing import Any, Literal

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from pliant.data.declared import DataDeclaration
from pliant.params import get_params, nbytes
from pliant.split.client import BatchRequest
from pliant.split.session import Session

RequestKind = Literal[
    "restore", "ask", "learn", "drop", "take", "params", "keep", "test", "declare"
]
MESSAGE_OVERHEAD = 1_000_000  # bytes allowed beyond the tensors
ACTIVATIONS, LABELS, GRADIENT = "body", "labels", "slope"


class KeptPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part that a device keeps on its disk, optimiser state included."""

    number: int  # 0 is the part before the first round
    digest: str = ""  # SHA-256, as `pliant.params.digest` returns it


class FrameHeader(
    Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="t"
):
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
    kept: KeptPart | None = None  # to keep or to restore


class SplitReply(FrameHeader, frozen=True, tag="answer"):
    """A device's reply to one request."""

    number: int
    saved_up_to: int  # the device's disk has the results up to this number
    seconds: float = 0.0  # spent on the mini-batch that ends here
    shape: tuple[int, ...] = ()  # of the activations
    declaration: DataDeclaration | None = None  # of a device with its own data
    digest: str = ""  # of the part that was kept or restored
    tests: int = 0  # images that the network was tested on
    correct: int = 0


class RunFinished(FrameHeader, frozen=True, tag="bye"):
    """The run is over."""


ServerHeader = SplitRunConfig | SplitRequest | RunFinished
DeviceHeader = Ready | SplitReply


def find_max_message_bytes(session: Session, *, to_device: bool) -> int:
    """Return the size that no valid frame of a session exceeds; tests need the server's part."""
    shape = (session.local.batch, *session.activation_shape)
    sizes = [session.device_bytes, session.payload.dense_size(shape)]
    if to_device:
        sizes.append(nbytes(get_params(session.split_network.server)))
    return 2 * max(sizes) + MESSAGE_OVERHEAD


def bytes_to_tensor(raw: bytes) -> Tensor:
    """Wrap bytes in a tensor, which safetensors can carry."""
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy())


def tensor_to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
