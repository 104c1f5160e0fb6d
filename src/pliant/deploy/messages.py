"""The messages between server and device, and the encoding of all messages.

A message is a header of plain data and named tensors, encoded like a checkpoint: safetensors with
a SHA-256, and no code. Times are durations, because the clocks of two machines differ.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from pliant.data.declared import DataDeclaration
from pliant.deploy.settings import MalformedMessage, Pace
from pliant.deploy.step_times import CurvePoints
from pliant.deploy.versions import Versions, find_version_problem
from pliant.experiment.config import Experiment, ServerConfig
from pliant.params import Params, flatten
from pliant.storage import checkpoint
from pliant.value import encode

DELTA, EXTRA, PARAMS = "change", "extra", "params"


class TrainRequest(Struct, frozen=True):
    """Ask a device to train, to test a network, or only to report its speed and data."""

    kind: Literal["hello", "train", "test"]
    experiment: Any  # as returned by `pliant.value.encode`
    device: int
    round: int = 0
    lr: float = 0.0
    pace: Pace = "measured"
    row: int | None = None  # if the server chooses it
    macs: float = 0.0  # expected of the first mini-batch, if the server chooses the row
    seconds: float = 0.0  # from the request's arrival to the reply, without the grace
    merged_round: int | None = None  # the last round in which this device's update was merged
    last_row: int | None = None  # that the device may choose; None: any
    nonce: str = ""  # 128 bits, which the reply repeats
    versions: Versions = Versions()
    declaration: DataDeclaration | None = None  # the device's own, if it has its own data
    # rows and MACs of all mini-batches, if the server has planned them
    steps: tuple[tuple[int, float], ...] = ()


class TrainReply(Struct, frozen=True):
    """A device's report; the server must trust none of it."""

    kind: Literal["hello", "update", "late", "declined", "failed", "score"]
    device: int
    round: int = 0
    reason: str = ""
    rows: tuple[int, ...] = ()  # of each mini-batch
    times: tuple[float, ...] = ()  # start of each mini-batch, and end of the last one
    seconds: float = 0.0  # since the request arrived
    samples: int = 0
    macs: float = 0.0
    loss: float | None = None
    num_samples: int = 0  # on the device, of which it used all
    short: int = 0  # mini-batches for which even the smallest row was too expensive
    curve: CurvePoints = ()  # of the mini-batches now
    nonce: str = ""  # of the request
    versions: Versions = Versions()
    declaration: DataDeclaration | None = None  # in reply to a hello, if it has its own data
    tests: int = 0  # images that a network was tested on
    correct: int = 0
    charge: float | None = None  # of its battery, from 0 to 1, if it has one
    is_charging: bool | None = None


def has_own_data(experiment: Experiment, pace: Pace) -> bool:
    """Return whether devices bring their own data; else they share out that of the experiment."""
    return experiment.network.input is not None and pace == "measured"


def encode_for_devices(experiment: Experiment, pace: Pace = "measured") -> Any:
    """Encode an experiment without what only its server needs; a rehearsal uses its [data]."""
    network = experiment.network
    if not has_own_data(experiment, pace):
        network = replace(network, input=None, classes=None, mean=(), std=())
    return encode(replace(experiment, server=ServerConfig(), network=network))


def encode_message(header: Struct, tensors: Mapping[str, Any] | None = None) -> bytes:
    """Encode a message; its tensors may come in named groups."""
    return checkpoint.to_bytes(flatten(tensors or {}), msgspec.to_builtins(header))


def decode_message(raw: bytes, header_type: Any) -> tuple[Any, Params]:
    """Return a message's header and tensors, or raise `MalformedMessage` with one line."""
    try:
        tensors, header = checkpoint.from_bytes(raw, "body")
        if header_type in (TrainRequest, TrainReply) and (problem := find_version_problem(header)):
            raise MalformedMessage(problem)
        return msgspec.convert(header, header_type), tensors
    except MalformedMessage:
        raise
    except checkpoint.CorruptCheckpoint as error:
        raise MalformedMessage(f"an intact message: {error}") from None
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"a valid header: {error}") from None
    except Exception as error:  # nothing that the other side sends may stop this one
        raise MalformedMessage(f"a readable message, got {type(error).__name__}") from None
