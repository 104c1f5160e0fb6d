"""Write TensorBoard event files without TensorBoard: checksummed records of protocol buffers.

Steps are rounds. The wall time of an event is the run's virtual time, so that TensorBoard's
"relative" axis shows virtual seconds.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records

FOLDER = "tensorboard"
FILE_NAME = "events.out.tfevents.0000000000.pliant"
FILE_VERSION = b"brain.Event:2"
POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


def write_tensorboard(folder: Path, records: Iterable[RoundRecord]) -> Iterator[RoundRecord]:
    """Yield the records of a run, and write each to the run's event file before.

    The first record of a resumed run is a later round: earlier ones are copied from its records.
    """
    stream = iter(records)
    first = next(stream, None)
    if first is None:
        return  # keep the file of a finished run
    past = [record for record in _read_rounds(folder) if record.round < first.round]
    path = folder / FOLDER / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    macs = traffic = 0.0
    with open(path, "wb") as file:
        file.write(frame_record(encode_event(0.0, version=FILE_VERSION)))
        for record in chain(past, [first], stream):
            macs += record.macs
            traffic += record.up + record.down
            values = collect_scalars(record, macs, traffic)
            event = encode_event(record.seconds, step=record.round + 1, values=values)
            file.write(frame_record(event))
            file.flush()
            if record.round >= first.round:
                yield record


def export_tensorboard(folder: Path) -> Path:
    """Write the event file of a finished run and return its path."""
    for _ in write_tensorboard(folder, _read_rounds(folder)):
        pass
    return folder / FOLDER / FILE_NAME


def _read_rounds(folder: Path) -> Iterator[RoundRecord]:
    return (record for record in read_records(folder) if isinstance(record, RoundRecord))


def collect_scalars(record: RoundRecord, macs: float, traffic: float) -> dict[str, float]:
    """Return the scalars of a round by tag; `macs` and `traffic` are totals so far."""
    scalars: dict[str, float | None] = {
        "accuracy": record.accuracy,
        "devices/accuracy": record.on_devices.accuracy if record.on_devices else None,
        "devices/spread": record.on_devices.spread if record.on_devices else None,
        "devices/worst decile": record.on_devices.worst_decile if record.on_devices else None,
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
