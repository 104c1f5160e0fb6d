"""TensorBoard event files: checked against the standard and by TensorBoard itself."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.analysis.runs_on_disk import write_run

from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records
from pliant.report.tensorboard import (
    crc32c,
    encode_event,
    encode_varint,
    export_tensorboard,
    frame_record,
    write_tensorboard,
)


@pytest.mark.parametrize(
    ("payload", "value"),  # RFC 3720, B.4
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_checksum_is_that_of_the_standard(payload, value):
    assert crc32c(payload) == value


@given(number=st.integers(0, 2**63 - 1))
def test_a_varint_can_be_read_back(number):
    encoded = encode_varint(number)
    assert sum((byte & 127) << 7 * index for index, byte in enumerate(encoded)) == number
    assert [byte >> 7 for byte in encoded] == [1] * (len(encoded) - 1) + [0]


def test_an_event_is_the_protocol_buffer_that_tensorboard_reads():
    event = encode_event(2.0, step=3, values={"a": 0.5})
    scalar = b"\x0a\x01a\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    header = b"\x09" + struct.pack("<d", 2.0) + b"\x10\x03\x2a"
    assert event == header + bytes([len(summary)]) + summary


def read_events(path):
    """Return the payloads of an event file, with their checksums verified."""
    rest, payloads = path.read_bytes(), []
    while rest:
        size = struct.unpack("<Q", rest[:8])[0]
        payload = rest[12 : 12 + size]
        assert rest[: 16 + size] == frame_record(payload)
        payloads.append(payload)
        rest = rest[16 + size :]
    return payloads


def test_a_run_is_exported_round_by_round(tmp_path):
    folder = write_run(tmp_path / "run", [0.25, None, 0.5])
    events = read_events(export_tensorboard(folder))
    assert len(events) == 4
    assert b"brain.Event:2" in events[0]
    assert [b"accuracy" in event for event in events[1:]] == [True, False, True]
    assert struct.pack("<f", 0.25) in events[1]
    assert [struct.unpack("<d", event[1:9])[0] for event in events] == [0.0, 1.0, 2.0, 3.0]


def test_a_resumed_run_has_the_same_file_as_an_uninterrupted_one(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4])
    expected = export_tensorboard(folder).read_bytes()
    rounds = [record for record in read_records(folder) if isinstance(record, RoundRecord)]
    assert list(write_tensorboard(folder, rounds[2:])) == rounds[2:]
    (path,) = (folder / "tensorboard").iterdir()
    assert path.read_bytes() == expected
    assert list(write_tensorboard(folder, [])) == []  # as when a finished run is resumed
    assert path.read_bytes() == expected


def test_a_round_is_on_disk_before_it_is_shown(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    rounds = [record for record in read_records(folder) if isinstance(record, RoundRecord)]
    writer = write_tensorboard(folder, rounds)
    assert next(writer) == rounds[0]
    (path,) = (folder / "tensorboard").iterdir()
    assert len(read_events(path)) == 2
    writer.close()


def test_tensorboard_itself_reads_it(tmp_path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no TensorBoard here"
    )
    folder = write_run(tmp_path / "run", [0.25, 0.5])
    events = reader.EventAccumulator(str(export_tensorboard(folder).parent))
    events.Reload()
    scalars = events.Scalars("accuracy")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(1, 0.25), (2, 0.5)]
