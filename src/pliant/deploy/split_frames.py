"""Frames of split learning on a stream: a small head, and tensors in safetensors. No code in it.

Server and device number what is asked, and every question has exactly one answer. Numbers count
from 1 within an *epoch*: the time from one restoring of a device's part by the server to the next.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import safetensors.torch
import torch
from msgspec import Struct
from torch import Tensor

from pliant.params import Params
from pliant.split.client import Turn

VERSION = 1
Kind = Literal["restore", "ask", "learn", "drop", "take", "forget", "params", "state"]
BODY, LABELS, SLOPE = "body", "labels", "slope"


class BadFrame(ValueError):
    """Bytes that are no frame."""


class Head(Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """What every frame begins with."""


class Hello(Head, frozen=True, tag="hello"):
    """A device says which one it is, and which process: the same one after a broken stream."""

    device: int
    process: str = ""
    version: int = VERSION


class Challenge(Head, frozen=True, tag="challenge"):
    """The server asks for a signature."""

    nonce: bytes
    name: str  # of the federation


class Proof(Head, frozen=True, tag="proof"):
    """A device signs; without keys there is nothing to sign with."""

    signature: bytes


class Welcome(Head, frozen=True, tag="welcome"):
    """The server tells what is run, and where the two of them are."""

    epoch: str
    experiment: Any  # as `pliant.value.encode` gives it


class Ready(Head, frozen=True, tag="ready"):
    """A device has what it needs, and goes on after a question that it has done."""

    epoch: str
    done: int


class Question(Head, frozen=True, tag="question"):
    """The server asks for something."""

    number: int
    kind: Kind
    heard: int = 0  # up to which question the server has the answers
    turn: Turn | None = None


class Answer(Head, frozen=True, tag="answer"):
    """A device has done something."""

    number: int
    saved: int  # up to which question its disk knows what was done
    seconds: float = 0.0  # that the mini-batch which ends here has taken
    shape: tuple[int, ...] = ()  # of the activations


class Bye(Head, frozen=True, tag="bye"):
    """The run is over."""


Down = Challenge | Welcome | Question | Bye
Up = Hello | Proof | Ready | Answer


def framed(head: Down | Up, tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Write a frame: the head's length, the head, the tensors."""
    body = b""
    if tensors:
        # copies, because safetensors refuses tensors that share memory
        plain = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        body = safetensors.torch.save(plain)
    raw = msgspec.msgpack.encode(head)
    return len(raw).to_bytes(4, "little") + raw + body


_UP, _DOWN = (msgspec.msgpack.Decoder(type=kind) for kind in (Up, Down))


def read_up(raw: bytes) -> tuple[Up, Params]:
    """Read what a device sent, or raise `BadFrame`."""
    return _read(raw, _UP)


def read_down(raw: bytes) -> tuple[Down, Params]:
    """Read what a server sent, or raise `BadFrame`."""
    return _read(raw, _DOWN)


def _read(raw: bytes, decoder: "msgspec.msgpack.Decoder[Any]") -> tuple[Any, Params]:
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 + size:
        raise BadFrame(f"expected a frame of {4 + size} bytes or more, got {len(raw)}")
    try:
        head = decoder.decode(raw[4 : 4 + size])
        rest = raw[4 + size :]
        return head, safetensors.torch.load(rest) if rest else {}
    except Exception as error:  # whatever comes, the other side goes on
        raise BadFrame(f"expected a frame that can be read, got {type(error).__name__}") from None


def to_tensor(raw: bytes) -> Tensor:
    """Return bytes as safetensors carries them."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else _NOTHING


def to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes in a tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


_NOTHING = torch.zeros(0, dtype=torch.uint8)
