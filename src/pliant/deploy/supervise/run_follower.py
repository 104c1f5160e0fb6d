"""Follow a run through the records that its processes write."""

from pathlib import Path

import msgspec

from pliant.deploy.supervise.child_process import read_complete_lines
from pliant.engine.ledger import Record, RoundRecord
from pliant.engine.run_store import CHECKPOINTS, EVENTS_FILE
from pliant.storage import formats
from pliant.storage.jsonl import check_header


class RunFollower:
    """Read the rounds of a run as they are written."""

    def __init__(self, folder: Path) -> None:
        self._path, self._checkpoints = folder / EVENTS_FILE, folder / CHECKPOINTS
        self._decoder = msgspec.json.Decoder(Record)
        self._offset, self._last_line = 0, b""
        self._records: list[RoundRecord] = []

    def read_rounds(self) -> list[RoundRecord]:
        """Return the records of all rounds so far."""
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
            lines = read_complete_lines(file)
        records = [self._decoder.decode(line) for line in lines]
        self._records += [record for record in records if isinstance(record, RoundRecord)]
        self._offset += sum(map(len, lines))
        self._last_line = lines[-1] if lines else self._last_line
        return self._records

    def is_done(self) -> bool:
        """Return whether the last round that was read has ended the run and is in a checkpoint."""
        rounds = self._records
        if not rounds or rounds[-1].digest is None:
            return False
        return (self._checkpoints / f"{rounds[-1].round + 1:08d}.ckpt").exists()
