"""Follow a growing file of JSON lines: read each complete line once."""

import os
from pathlib import Path

CHUNK_BYTES = 1 << 22


class FileTail:
    """The offset up to which the complete lines of a file were read.

    A resumed run truncates its file to the last checkpoint and writes on: then the bytes before the
    offset differ or are gone, and reading restarts at 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._marker = b""  # the last line read, compared to detect that the file was rewritten

    def read_new_lines(self, max_bytes: int = CHUNK_BYTES) -> tuple[bool, bytes]:
        """Return whether the file was truncated, and the next complete lines, about `max_bytes`."""
        try:
            file = open_no_follow(self.path)
        except FileNotFoundError:
            is_cut, self.offset, self._marker = self.offset > 0, 0, b""
            return is_cut, b""
        with os.fdopen(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            is_cut = self._is_truncated(stream.fileno(), size)
            if is_cut:
                self.offset, self._marker = 0, b""
            stream.seek(self.offset)
            text = stream.read(max_bytes)
            if b"\n" not in text:  # a line longer than `max_bytes`
                text += stream.readline()
        end = text.rfind(b"\n") + 1
        self.offset += end
        if end:
            self._marker = text[text.rfind(b"\n", 0, end - 1) + 1 : end]
        return is_cut, text[:end]

    def _is_truncated(self, descriptor: int, size: int) -> bool:
        if size < self.offset:
            return True
        start = self.offset - len(self._marker)
        return os.pread(descriptor, len(self._marker), start) != self._marker


def open_no_follow(path: Path) -> int:
    """Open a file for reading; refuse a symbolic link."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))


def read_range(path: Path, start: int, end: int) -> bytes:
    with os.fdopen(open_no_follow(path), "rb") as stream:
        stream.seek(start)
        return stream.read(end - start)
