"""Write TensorBoard event files without TensorBoard: checksummed records of protocol buffers.

Steps are rounds. The wall time of an event is the run's virtual time, so that TensorBoard's
"relative" axis shows virtual seconds.
"""

import struct
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records

FOLDER = "tensorboard"
FILE_NAME = "events.out.tfevents.0000000000.pliant"
FILE_VERSION = b"brain.Event:2"
POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


class TensorBoardWriter:
    """The event file of a run, rewritten at the first record and then appended to.

    The first record of a resumed run is a later round: earlier ones are copied from its records.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FOLDER / FILE_NAME
        self._folder = folder
        self._file: BinaryIO | None = None
        self._macs = self._traffic = 0.0

    def add(self, record: RoundRecord) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "wb")  # noqa: SIM115 - closed by close()
            self._file.write(frame_record(encode_event(0.0, version=FILE_VERSION)))
            for past in read_records(self._folder) if record.round else ():
                if isinstance(past, RoundRecord) and past.round < record.round:
                    self._write_round(past)
        self._write_round(record)
        self._file.flush()

    def _write_round(self, record: RoundRecord) -> None:
        assert self._file is not None
        self._macs += record.macs
        self._traffic += record.up + record.down
        values = collect_scalars(record, self._macs, self._traffic)
        event = encode_event(record.seconds, step=record.round + 1, values=values)
        self._file.write(frame_record(event))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def export_tensorboard(folder: Path) -> Path:
    """Write the event file of a finished run and return its path."""
    with closing(TensorBoardWriter(folder)) as writer:
        for record in read_records(folder):
            if isinstance(record, RoundRecord):
                writer.add(record)
    return writer.path


def collect_scalars(record: RoundRecord, macs: float, traffic: float) -> dict[str, float]:
    """Return the scalars of a round by tag; `macs` and `traffic` are totals so far."""
    scalars: dict[str, float | None] = {
        "accuracy": record.accuracy,
        "loss/train": record.loss,
        "loss/test": record.score.loss if record.score else None,
        "devices/utilisation": record.utilisation,
        "devices/merged": record.merged / record.tasks if record.tasks else None,
        "cost/MACs": macs,
        "cost/bytes": traffic,
        "cost/seconds": record.seconds,
    }
    return {tag: value for tag, value in scalars.items() if value is not None}


def encode_event(
    wall_time: float,
    *,
    step: int = 0,
    version: bytes = b"",
    values: Mapping[str, float] | None = None,
) -> bytes:
    """Encode an Event: its wall time, and a file version or a summary of scalars."""
    parts = [b"\x09", struct.pack("<d", wall_time)]  # field 1, a double
    if step:
        parts += [b"\x10", encode_varint(step)]  # field 2, an int64
    if version:
        parts += [b"\x1a", _encode_with_length(version)]  # field 3, a string
    if values:
        scalars = [_encode_with_length(_encode_scalar(*pair)) for pair in values.items()]
        summary = b"".join(b"\x0a" + scalar for scalar in scalars)
        parts += [b"\x2a", _encode_with_length(summary)]  # field 5, a message
    return b"".join(parts)


def _encode_scalar(tag: str, value: float) -> bytes:
    name, number = _encode_with_length(tag.encode()), struct.pack("<f", value)
    return b"\x0a" + name + b"\x15" + number  # fields 1 and 2


def _encode_with_length(payload: bytes) -> bytes:
    return encode_varint(len(payload)) + payload


def encode_varint(number: int) -> bytes:
    """Encode an integer in groups of seven bits, the lowest first.

    >>> from pliant.report.tensorboard import encode_varint
    >>> encode_varint(300).hex()
    'ac02'
    """
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def frame_record(payload: bytes) -> bytes:
    """Frame a record for the file: length and payload, each with a checksum."""
    length = struct.pack("<Q", len(payload))
    return length + _compute_masked_crc(length) + payload + _compute_masked_crc(payload)


def _compute_masked_crc(payload: bytes) -> bytes:
    """Return the masked CRC-32C, which is safe to checksum again."""
    value = crc32c(payload)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(payload: bytes) -> int:
    """Return the CRC-32C of some bytes (RFC 3720, appendix B.4).

    >>> from pliant.report.tensorboard import crc32c
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in payload:
        value = CRC_TABLE[(value ^ byte) & 255] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _compute_crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


CRC_TABLE = tuple(map(_compute_crc_entry, range(256)))
