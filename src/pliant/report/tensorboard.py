"""TensorBoard event files, written by hand: records with checksums around small protocol buffers.

Steps are rounds. The wall time of an event is the run's virtual time, so that TensorBoard's axis
"relative" shows virtual seconds.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from pliant.engine.ledger import RoundRecord
from pliant.engine.store import events

FOLDER = "tensorboard"
NAME = "events.out.tfevents.0000000000.pliant"
VERSION = b"brain.Event:2"
POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


class Board:
    """The event file of a run, made anew when its first record comes; others follow at once.

    A run that goes on where it was brings a later round first: those before it are then taken from
    its records.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FOLDER / NAME
        self._folder = folder
        self._file: BinaryIO | None = None
        self._macs = self._sent = 0.0

    def add(self, record: RoundRecord) -> None:
        """Write one round."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "wb")  # noqa: SIM115 - closed by close()
            self._file.write(framed(event(0.0, version=VERSION)))
            for past in events(self._folder) if record.round else ():
                if isinstance(past, RoundRecord) and past.round < record.round:
                    self._write(past)
        self._write(record)
        self._file.flush()

    def _write(self, record: RoundRecord) -> None:
        assert self._file is not None
        self._macs += record.macs
        self._sent += record.up + record.down
        values = scalars(record, self._macs, self._sent)
        self._file.write(framed(event(record.seconds, step=record.round + 1, values=values)))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def export(folder: Path) -> Path:
    """Write the event file of a run that has ended, and return it."""
    board = Board(folder)
    try:
        for record in events(folder):
            if isinstance(record, RoundRecord):
                board.add(record)
    finally:
        board.close()
    return board.path


def scalars(record: RoundRecord, macs: float, sent: float) -> dict[str, float]:
    """Return what TensorBoard shows of a round, by tag; sums are over all rounds so far."""
    found: dict[str, float | None] = {
        "accuracy": record.accuracy,
        "loss/train": record.loss,
        "loss/test": record.score.loss if record.score else None,
        "devices/utilisation": record.utilisation,
        "devices/merged": record.merged / record.tasks if record.tasks else None,
        "cost/MACs": macs,
        "cost/bytes": sent,
        "cost/seconds": record.seconds,
    }
    return {tag: value for tag, value in found.items() if value is not None}


def event(
    wall: float, *, step: int = 0, version: bytes = b"", values: Mapping[str, float] | None = None
) -> bytes:
    """Return one Event: its wall time, and a file version or a summary of scalars."""
    parts = [b"\x09", struct.pack("<d", wall)]  # field 1, a double
    if step:
        parts += [b"\x10", varint(step)]  # field 2, an int64
    if version:
        parts += [b"\x1a", _sized(version)]  # field 3, a string
    if values:
        summary = b"".join(b"\x0a" + _sized(_scalar(*pair)) for pair in values.items())
        parts += [b"\x2a", _sized(summary)]  # field 5, a message
    return b"".join(parts)


def _scalar(tag: str, value: float) -> bytes:
    return b"\x0a" + _sized(tag.encode()) + b"\x15" + struct.pack("<f", value)  # fields 1 and 2


def _sized(text: bytes) -> bytes:
    return varint(len(text)) + text


def varint(number: int) -> bytes:
    """Return a whole number in groups of seven bits, the lowest first.

    >>> from pliant.report.tensorboard import varint
    >>> varint(300).hex()
    'ac02'
    """
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def framed(text: bytes) -> bytes:
    """Return a record as it stands in the file: its length, its text, a checksum of each."""
    length = struct.pack("<Q", len(text))
    return length + _checksum(length) + text + _checksum(text)


def _checksum(text: bytes) -> bytes:
    """Return the masked CRC-32C: rotated, so that a checksum of checksums is no special case."""
    value = crc32c(text)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(text: bytes) -> int:
    """Return the CRC-32C of some bytes (RFC 3720, appendix B.4).

    >>> from pliant.report.tensorboard import crc32c
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in text:
        value = TABLE[(value ^ byte) & 255] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


TABLE = tuple(map(_entry, range(256)))
