"""Files that are there whole or not at all: temporary file, fsync, rename, fsync of the folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


def write_bytes(path: Path, raw: bytes) -> None:
    """Replace the file by these bytes; after any kill it holds the old bytes or the new ones."""
    with replacing(path) as file:
        file.write(raw)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; it takes the place of `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
    try:
        with open(name, "xb") as file:  # not mkstemp: the file gets the rights that a new file has
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder last; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
