"""Atomic writes: temporary file, fsync, rename, fsync of the folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


def write_bytes(path: Path, raw: bytes, *, is_private: bool = False) -> None:
    """Replace a file's contents; after any kill it holds either the old bytes or the new ones."""
    with replace_file(path, is_private=is_private) as file:
        file.write(raw)


@contextmanager
def replace_file(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    Only its owner can read a private file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
    try:
        mode = 0o600 if is_private else 0o666
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable; Windows needs no such call."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
