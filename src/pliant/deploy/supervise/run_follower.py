"""Follow a run through the files that its processes write: its records and its log."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from pliant.storage import formats
from pliant.storage.jsonl import check_header

if TYPE_CHECKING:
    from pliant.engine.ledger import RoundRecord

log = logging.getLogger("pliant")

_LEVELS = {logging.getLevelName(level): level for level in (logging.INFO, logging.WARNING)}


class RunFollower:
    """Read the rounds of a run as they are written."""

    def __init__(self, folder: Path) -> None:
        from pliant.engine.ledger import Record  # loads torch, which a device's supervisor does not
        from pliant.engine.run_store import CHECKPOINTS, EVENTS_FILE

        self._path, self._checkpoints = folder / EVENTS_FILE, folder / CHECKPOINTS
        self._decoder = msgspec.json.Decoder(Record)
        self._offset, self._last_line = 0, b""
        self._records: list[RoundRecord] = []

    def read_rounds(self) -> "list[RoundRecord]":
        """Return the records of all rounds so far."""
        from pliant.engine.ledger import RoundRecord

        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset - len(self._last_line))
            if not self._offset or file.read(len(self._last_line)) != self._last_line:
                # A resumed run has dropped records and written others.
                self._records, self._last_line = [], b""
                file.seek(0)
                self._offset = check_header(file, self._path, formats.RECORDS)
                if not self._offset:
                    return []
            lines = _read_complete_lines(file)
        for line in lines:
            record = self._decoder.decode(line)
            if isinstance(record, RoundRecord):
                self._records.append(record)
        self._offset += sum(map(len, lines))
        self._last_line = lines[-1] if lines else self._last_line
        return self._records

    def is_done(self) -> bool:
        """Return whether the last round that was read has ended the run and is in a checkpoint."""
        rounds = self._records
        if not rounds or rounds[-1].digest is None:
            return False
        return (self._checkpoints / f"{rounds[-1].round + 1:08d}.ckpt").exists()


class LogForwarder:
    """Forward the log of a child process to this one's; skip lines of other libraries."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def forward(self) -> None:
        """Log the lines that were written since the last call, or since the beginning."""
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            lines = _read_complete_lines(file)
        self._offset += sum(map(len, lines))
        for line in lines:
            level, _, message = line.decode(errors="replace").rstrip().partition(" pliant: ")
            if level in _LEVELS and message:
                log.log(_LEVELS[level], "%s", message)


def _read_complete_lines(file: BinaryIO) -> list[bytes]:
    lines, end, _ = file.read().rpartition(b"\n")
    return (lines + end).splitlines(keepends=True)
