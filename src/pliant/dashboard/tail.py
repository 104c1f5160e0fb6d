"""Following a growing file of JSON lines: what is new since the last look, and nothing twice."""

import os
from pathlib import Path

CHUNK = 1 << 22  # bytes of one look
MARK = 64  # bytes before the place where reading goes on, to see that they are still the same


class Tail:
    """The place in a file up to which its whole lines were read.

    A run that goes on after a kill cuts its file back to the last checkpoint and writes anew: then
    the bytes before the place differ or are gone, and reading begins at the start again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._mark = b""

    def look(self, most: int = CHUNK) -> tuple[bool, bytes]:
        """Return whether the file was cut back, and the next whole lines, about `most` bytes."""
        try:
            file = open_plain(self.path)
        except FileNotFoundError:
            was, self.offset, self._mark = self.offset, 0, b""
            return was > 0, b""
        with os.fdopen(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            is_cut = self._is_cut(stream.fileno(), size)
            if is_cut:
                self.offset, self._mark = 0, b""
            stream.seek(self.offset)
            text = stream.read(most)
            end = text.rfind(b"\n") + 1
            while not end and self.offset + len(text) < size:  # a line that is longer than a look
                more = stream.read(most)
                if not more:
                    break
                text += more
                end = text.rfind(b"\n") + 1
        self.offset += end
        if end:
            self._mark = (self._mark + text[max(0, end - MARK) : end])[-MARK:]
        return is_cut, text[:end]

    def _is_cut(self, file: int, size: int) -> bool:
        if size < self.offset:
            return True
        return os.pread(file, len(self._mark), self.offset - len(self._mark)) != self._mark


def open_plain(path: Path) -> int:
    """Open a file for reading; a symbolic link in its place is refused."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))


def read_part(path: Path, start: int, end: int) -> bytes:
    """Return some bytes of a file."""
    with os.fdopen(open_plain(path), "rb") as stream:
        stream.seek(start)
        return stream.read(end - start)
