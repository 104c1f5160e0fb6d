"""Forward the log of a child process to this process's log."""

import logging
from pathlib import Path

log = logging.getLogger("pliant")

_LEVELS = {logging.getLevelName(level): level for level in (logging.INFO, logging.WARNING)}


class LogForwarder:
    """Follow a log from its current end; skip lines of other libraries."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def forward(self) -> None:
        """Log the new lines."""
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            lines, end, _ = file.read().rpartition(b"\n")
        self._offset += len(lines + end)
        for line in lines.decode(errors="replace").splitlines():
            level, _, message = line.partition(" pliant: ")
            if level in _LEVELS and message:
                log.log(_LEVELS[level], "%s", message)
