"""Segments: a round's parameters in a file in memory that every worker process maps.

A worker maps it privately, copy on write: it reads what the parent wrote, without a copy, and what
it writes by accident is seen by nobody else.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pliant.engine.wire import Piece

MEMORY = Path("/dev/shm")
ROOM = 2**30  # bytes; containers often get 64 MB there, and a full one kills whoever writes


def memory_folder() -> Path:
    """Return the folder for files that should stay in memory, or else the one for temporary files.

    >>> memory_folder().is_dir()
    True
    """
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM:
        return MEMORY
    return Path(tempfile.gettempdir())


class Segment:
    """A file of fixed size that this process writes and others map."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        with path.open("xb+") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, a crash later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Put a message at the start of the file."""
        start = 0
        for piece in pieces:
            self._map[start : start + len(piece)] = piece
            start += len(piece)

    def close(self) -> None:
        """Unmap the file and remove it."""
        self._map.close()
        self.path.unlink(missing_ok=True)


def mapped(path: str) -> mmap.mmap:
    """Map a segment privately: writing to it changes nothing outside."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
