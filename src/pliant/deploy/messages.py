"""The messages between server and device, and the encoding of all messages.

A message is a header of plain data and named tensors, encoded like a checkpoint: safetensors with
a SHA-256, and no code. Tensors for many devices are encoded once: then header and tensors are
messages of their own, one after the other. Times are durations, because the clocks of two machines
differ.
"""

import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
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
SHARED_MAGIC = b"SHARED\x00"  # precedes the length of the header's message
_LENGTH = struct.Struct("<I")
MAX_ENCODINGS = 16  # of tensors, that are remembered


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


@dataclass(frozen=True)
class SharedMessage:
    """A message whose tensors stand in memory once, however many devices are sent them."""

    head: bytes  # all that precedes the tensors
    tensors: bytes

    def __len__(self) -> int:
        return len(self.head) + len(self.tensors)

    def __bytes__(self) -> bytes:
        return self.head + self.tensors


AnyMessage = bytes | SharedMessage


def list_buffers(message: AnyMessage) -> tuple[bytes, ...]:
    """Return the parts of a message, without copying them."""
    return (message,) if isinstance(message, bytes) else (message.head, message.tensors)


class SharedEncoder:
    """Encode messages to many devices, and tensors that several of them get only once."""

    def __init__(self) -> None:
        # by the identity of the tensors, which are kept so that no others get it
        self._encodings: OrderedDict[tuple[object, ...], tuple[Params, bytes]] = OrderedDict()

    def encode(self, header: Struct, tensors: Mapping[str, Any]) -> SharedMessage:
        """Encode a message; its tensors, which may come in groups, must not change any more."""
        flat = flatten(tensors)
        key = tuple((name, id(tensor)) for name, tensor in flat.items())
        if key not in self._encodings:
            self._encodings[key] = flat, checkpoint.to_bytes(flat, None)
            if len(self._encodings) > MAX_ENCODINGS:
                self._encodings.popitem(last=False)
        self._encodings.move_to_end(key)
        raw_header = encode_message(header)
        head = SHARED_MAGIC + _LENGTH.pack(len(raw_header)) + raw_header
        return SharedMessage(head, self._encodings[key][1])


def decode_message(raw: bytes, header_type: Any) -> tuple[Any, Params]:
    """Return a message's header and tensors, or raise `MalformedMessage` with one line."""
    try:
        raw, raw_tensors = _split_shared(raw)
        tensors, header = checkpoint.from_bytes(raw, "body")
        if raw_tensors is not None:
            tensors, _ = checkpoint.from_bytes(raw_tensors, "tensors")
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


def _split_shared(raw: bytes) -> tuple[bytes, bytes | None]:
    """Return the message of the header and, if they have one of their own, that of the tensors."""
    if not raw.startswith(SHARED_MAGIC):
        return raw, None
    start = len(SHARED_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack_from(raw, len(SHARED_MAGIC))
    return raw[start : start + length], raw[start + length :]
