"""Follow a run by the folder that its process writes."""

from pathlib import Path

from pliant.engine.ledger import RoundRecord
from pliant.engine.store import CHECKPOINTS, events

LOCK = "server.lock"  # of who serves a run; the run's own process has another
FAILURE = "failure.txt"  # in which a run says in one line why it has given up


class Follower:
    """The rounds of a run so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = 0  # bytes of the records
        self._known: list[RoundRecord] = []

    def rounds(self) -> list[RoundRecord]:
        """Return the records of rounds that are written."""
        path = self._folder / "events.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._read:
            found = events(self._folder) if size else iter(())
            self._known = [record for record in found if isinstance(record, RoundRecord)]
            self._read = size
        return self._known

    def is_done(self) -> bool:
        """Tell whether the last round is over, and saved."""
        rounds = self._known
        if not rounds or rounds[-1].digest is None:
            return False
        return (self._folder / CHECKPOINTS / f"{rounds[-1].round + 1:08d}.ckpt").exists()
