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


def write_shared(path: Path, chunks: Sequence[Chunk]) -> None:
    """Write a message to the start of a file, which never shrinks, so mappings of it stay valid."""
    with path.open("r+b" if path.exists() else "xb") as file:
        file.writelines(chunks)


def map_shared(path: Path) -> mmap.mmap:
    """Map a file copy-on-write."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
