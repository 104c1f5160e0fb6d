"""Follow a run through the records that its processes write."""

from pathlib import Path

import msgspec

from pliant.engine.ledger import Record, RoundRecord
from pliant.engine.run_store import CHECKPOINTS, EVENTS_FILE
from pliant.storage import formats
from pliant.storage.jsonl import JsonlHeader
from pliant.storage.tail import FileTail


class RunFollower:
    """Read the rounds of a run as they are written."""

    def __init__(self, folder: Path) -> None:
        self._tail, self._checkpoints = FileTail(folder / EVENTS_FILE), folder / CHECKPOINTS
        self._decoder = msgspec.json.Decoder(Record | JsonlHeader)
        self._records: list[RoundRecord] = []

    def read_rounds(self) -> list[RoundRecord]:
        """Return the records of all rounds so far."""
        while True:
            is_cut, lines = self._tail.read_new_lines()
            if is_cut:  # a resumed run has dropped records and written others
                self._records = []
            if not lines:
                return self._records
            for record in map(self._decoder.decode, lines.splitlines()):
                if isinstance(record, JsonlHeader):
                    formats.RECORDS.check(record.format, self._tail.path)
                elif isinstance(record, RoundRecord):
                    self._records.append(record)

    def is_done(self) -> bool:
        """Return whether the last round that was read has ended the run and is in a checkpoint."""
        rounds = self._records
        if not rounds or rounds[-1].digest is None:
            return False
        return (self._checkpoints / f"{rounds[-1].round + 1:08d}.ckpt").exists()
