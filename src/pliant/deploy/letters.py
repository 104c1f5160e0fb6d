"""Letters between server and device: what is asked, what is answered, and their bytes.

A letter is a head (plain data) and tensors, in the form of a checkpoint: safetensors under a
SHA-256. Nothing in it is code. Times are durations, because clocks on two machines differ.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from torch import Tensor

from pliant import checkpoint
from pliant.deploy.squeeze import AnySqueeze, Plain
from pliant.params import Params

CHANGE, EXTRA, PARAMS = "change", "extra", "params"

# What devices follow: what they measure, or, to rehearse, the traces of the experiment's fleet.
Pace = Literal["measured", "fleet"]


class Order(Struct, frozen=True):
    """What the server asks of a device: train, or only say how fast it is."""

    kind: Literal["hello", "train"]
    experiment: Any  # as `pliant.value.encode` gives it
    device: int
    round: int = 0
    lr: float = 0.0
    pace: Pace = "measured"
    row: int | None = None  # of a plan that the server holds, and
    macs: float = 0.0  # what it expects of the first mini-batch
    seconds: float = 0.0  # from here to the hand-over of the answer
    merged: int | None = None  # the last round of this device that counted
    squeeze: AnySqueeze = Plain()


class Answer(Struct, frozen=True):
    """What a device says; all of it is only a claim."""

    kind: Literal["hello", "update", "late", "declined", "failed"]
    device: int
    round: int = 0
    reason: str = ""
    rows: tuple[int, ...] = ()  # of each mini-batch
    times: tuple[float, ...] = ()  # when each began, and when the last one ended
    seconds: float = 0.0  # from the order's arrival
    samples: int = 0
    macs: float = 0.0
    loss: float | None = None
    owned: int = 0
    short: int = 0  # mini-batches for which even the smallest row was too much
    curve: tuple[tuple[float, float], ...] = ()  # share of the full MACs, seconds a mini-batch now


class BadLetter(ValueError):
    """Bytes that are no letter."""


def packed(
    head: Order | Answer, tensors: Mapping[str, Mapping[str, Tensor]] | None = None
) -> bytes:
    """Encode a letter; its tensors come in groups."""
    flat = {
        f"{group}/{name}": tensor
        for group, params in (tensors or {}).items()
        for name, tensor in params.items()
    }
    return checkpoint.to_bytes(flat, msgspec.to_builtins(head))


def read_order(raw: bytes) -> tuple[Order, dict[str, Params]]:
    """Decode what a server sent."""
    flat, head = _opened(raw)
    return msgspec.convert(head, Order), _grouped(flat)


def read_answer(raw: bytes) -> tuple[Answer, dict[str, Params]]:
    """Decode what a device sent, or say in one line why it cannot be."""
    flat, head = _opened(raw)
    try:
        return msgspec.convert(head, Answer), _grouped(flat)
    except msgspec.ValidationError as error:
        raise BadLetter(f"a head as asked for, got another: {error}") from None


def _opened(raw: bytes) -> tuple[Params, Any]:
    try:
        return checkpoint.from_bytes(raw, "letter")
    except checkpoint.CorruptCheckpoint as error:
        raise BadLetter(f"a whole letter, got another: {error}") from None
    except Exception as error:  # whatever a device sends, the server goes on
        raise BadLetter(f"a letter that can be read, got {type(error).__name__}") from None


def _grouped(flat: Mapping[str, Tensor]) -> dict[str, Params]:
    found: dict[str, Params] = {}
    for path, tensor in flat.items():
        group, _, name = path.partition("/")
        found.setdefault(group, {})[name] = tensor
    return found
