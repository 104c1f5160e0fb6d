"""What a process that we have started says in its log, said again in ours."""

import logging
from pathlib import Path

log = logging.getLogger("pliant")

FORMAT = "%(levelname)s pliant: %(message)s"  # of such a log
_LEVELS = {logging.getLevelName(level): level for level in (logging.INFO, logging.WARNING)}


class Echo:
    """A log that is followed from where it ends now; what others write there is left alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0  # bytes

    def say(self) -> None:
        """Say what is new."""
        with open(self._path, "rb") as file:
            file.seek(self._read)
            said, end, _ = file.read().rpartition(b"\n")
        self._read += len(said + end)
        for line in said.decode(errors="replace").splitlines():
            level, _, message = line.partition(" pliant: ")
            if level in _LEVELS and message:
                log.log(_LEVELS[level], "%s", message)
