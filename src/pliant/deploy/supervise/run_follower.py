"""Follow a run through the files that its process writes."""

from pathlib import Path

from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import CHECKPOINTS, read_records


class RunFollower:
    """Read the rounds of a run as they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes_read = 0
        self._records: list[RoundRecord] = []

    def read_rounds(self) -> list[RoundRecord]:
        """Return the records of all rounds so far."""
        path = self._folder / "events.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._bytes_read:
            records = read_records(self._folder) if size else iter(())
            self._records = [record for record in records if isinstance(record, RoundRecord)]
            self._bytes_read = size
        return self._records

    def is_done(self) -> bool:
        """Return whether the last round is written and its checkpoint saved."""
        rounds = self._records
        if not rounds or rounds[-1].digest is None:
            return False
        return (self._folder / CHECKPOINTS / f"{rounds[-1].round + 1:08d}.ckpt").exists()
