"""Event files for TensorBoard: checked against the standard, and by its own reader where it is."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_on_disk import write_run

from pliant.engine.ledger import RoundRecord
from pliant.engine.store import events
from pliant.report.tensorboard import Board, crc32c, event, export, framed, varint


@pytest.mark.parametrize(
    ("text", "value"),  # RFC 3720, B.4
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_checksum_is_that_of_the_standard(text, value):
    assert crc32c(text) == value


@given(number=st.integers(0, 2**63 - 1))
def test_a_varint_can_be_read_back(number):
    found = varint(number)
    assert sum((byte & 127) << 7 * place for place, byte in enumerate(found)) == number
    assert [byte >> 7 for byte in found] == [1] * (len(found) - 1) + [0]


def test_an_event_is_the_protocol_buffer_that_tensorboard_reads():
    got = event(2.0, step=3, values={"a": 0.5})
    scalar = b"\x0a\x01a\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    assert (
        got == b"\x09" + struct.pack("<d", 2.0) + b"\x10\x03\x2a" + bytes([len(summary)]) + summary
    )


def records(path):
    """Return the texts of an event file, each with its checksums verified."""
    raw, found = path.read_bytes(), []
    while raw:
        size = struct.unpack("<Q", raw[:8])[0]
        text = raw[12 : 12 + size]
        assert raw[: 16 + size] == framed(text)
        found.append(text)
        raw = raw[16 + size :]
    return found


def test_a_run_is_exported_round_by_round(tmp_path):
    folder = write_run(tmp_path / "run", [0.25, None, 0.5])
    found = records(export(folder))
    assert len(found) == 4
    assert b"brain.Event:2" in found[0]
    assert [b"accuracy" in text for text in found[1:]] == [True, False, True]
    assert struct.pack("<f", 0.25) in found[1]
    assert [struct.unpack("<d", text[1:9])[0] for text in found] == [0.0, 1.0, 2.0, 3.0]


def test_a_run_that_goes_on_has_the_same_file_as_one_that_never_stopped(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4])
    whole = export(folder).read_bytes()
    board = Board(folder)
    for record in events(folder):
        if isinstance(record, RoundRecord) and record.round >= 2:
            board.add(record)
    board.close()
    assert board.path.read_bytes() == whole


def test_what_was_added_is_in_the_file_at_once(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    rounds = [record for record in events(folder) if isinstance(record, RoundRecord)]
    board = Board(folder)
    board.add(rounds[0])
    assert len(records(board.path)) == 2
    board.close()


def test_tensorboard_itself_reads_it(tmp_path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no TensorBoard here"
    )
    folder = write_run(tmp_path / "run", [0.25, 0.5])
    found = reader.EventAccumulator(str(export(folder).parent))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("accuracy")] == [(1, 0.25), (2, 0.5)]
