"""Share a round's parameters with worker processes through a memory-mapped file.

Workers map it copy-on-write: reading needs no copy, and an accidental write stays private.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pliant.workers.serialisation import Chunk

SHM_FOLDER = Path("/dev/shm")
MIN_FREE_BYTES = 2**30  # containers often have only 64 MB there, and a write beyond it is fatal


def choose_memory_folder() -> Path:
    """Return the folder for files in memory if it has room, else the one for temporary files.

    >>> choose_memory_folder().is_dir()
    True
    """
    is_writable = SHM_FOLDER.is_dir() and os.access(SHM_FOLDER, os.W_OK)
    if is_writable and shutil.disk_usage(SHM_FOLDER).free >= MIN_FREE_BYTES:
        return SHM_FOLDER
    return Path(tempfile.gettempdir())


class Segment:
    """A file of fixed size that this process writes and workers map."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        with path.open("xb+") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a crash later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Write a message to the start of the file."""
        start = 0
        for chunk in chunks:
            self._map[start : start + len(chunk)] = chunk
            start += len(chunk)

    def close(self) -> None:
        """Unmap the file and remove it."""
        self._map.close()
        self.path.unlink(missing_ok=True)


def map_segment(path: str) -> mmap.mmap:
    """Map a segment copy-on-write."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
