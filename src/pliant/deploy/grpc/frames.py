"""Frames of split learning on a gRPC stream: a small header and tensors in safetensors, no code.

The server numbers its requests, and every request gets exactly one reply. Numbers start at 1 in
each *epoch*, which lasts from one restore of a device's part by the server to the next.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
import safetensors.torch
import torch
from msgspec import Struct
from torch import Tensor

from pliant.params import Params
from pliant.split.client import BatchRequest

PROTOCOL_VERSION = 2
RequestKind = Literal["restore", "ask", "learn", "drop", "take", "forget", "params", "state"]
ACTIVATIONS, LABELS, GRADIENT = "body", "labels", "slope"

H = TypeVar("H")


class MalformedFrame(ValueError):
    """Bytes that are not a valid frame."""


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


def encode_frame(
    header: ServerHeader | DeviceHeader, tensors: Mapping[str, Tensor] | None = None
) -> bytes:
    """Encode a frame: the header's length, the header, the tensors."""
    body = b""
    if tensors:
        # copies, because safetensors refuses tensors that share memory
        copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        body = safetensors.torch.save(copies)
    encoded_header = msgspec.msgpack.encode(header)
    return len(encoded_header).to_bytes(4, "little") + encoded_header + body


DEVICE_DECODER: "msgspec.msgpack.Decoder[DeviceHeader]" = msgspec.msgpack.Decoder(DeviceHeader)
SERVER_DECODER: "msgspec.msgpack.Decoder[ServerHeader]" = msgspec.msgpack.Decoder(ServerHeader)


def decode_frame(raw: bytes, decoder: "msgspec.msgpack.Decoder[H]") -> tuple[H, Params]:
    """Decode a frame by the decoder of its sender, or raise `MalformedFrame`."""
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 + size:
        raise MalformedFrame(f"expected a frame of at least {4 + size} bytes, got {len(raw)}")
    try:
        header = decoder.decode(raw[4 : 4 + size])
        body = raw[4 + size :]
        return header, safetensors.torch.load(body) if body else {}
    except Exception as error:  # no input from the other side may crash this one
        raise MalformedFrame(f"expected a readable frame, got {type(error).__name__}") from None


def bytes_to_tensor(raw: bytes) -> Tensor:
    """Wrap bytes in a tensor, which safetensors can carry."""
    if not raw:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
