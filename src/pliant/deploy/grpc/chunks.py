"""Frames in chunks: no gRPC message is large, whatever the size of a frame.

A message has one byte that says whether more of its frame follow, and a chunk of it. So the limit
of messages is small for everyone, also for those who have proved nothing; a frame that many devices
are sent stands in memory once; and what a device sends need not stand in memory at all. Importing
this does not load torch.
"""

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

from pliant.deploy.settings import MalformedMessage

CHUNK_BYTES = 256 * 1024
MAX_MESSAGE_BYTES = CHUNK_BYTES + 1
MORE, LAST = b"\x00", b"\x01"
Buffers = tuple[bytes, ...]  # of which a frame consists


class FrameTooLarge(MalformedMessage):
    """A frame exceeds what a valid one can have."""


def iter_chunks(*buffers: bytes) -> Iterator[bytes]:
    """Yield the messages that carry a frame.

    >>> from pliant.deploy.grpc.chunks import iter_chunks
    >>> list(iter_chunks(b"head", b"body"))
    [b'\\x01headbody']
    """
    parts: list[memoryview] = []
    room, left = CHUNK_BYTES, sum(map(len, buffers))
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            part, view = view[:room], view[room:]
            parts.append(part)
            room, left = room - len(part), left - len(part)
            if not room and left:
                yield b"".join((MORE, *parts))
                parts, room = [], CHUNK_BYTES
    yield b"".join((LAST, *parts))


class FrameJoiner:
    """Put the frames of one stream together again."""

    def __init__(self, find_limit: Callable[[], int], open_file: Callable[[], IO[bytes]] = BytesIO):
        self._find_limit, self._open_file = find_limit, open_file
        self._file: IO[bytes] | None = None
        self._size = 0

    def add(self, message: bytes) -> IO[bytes] | None:
        """Return a frame if it is complete, to be read from its start."""
        flag, chunk = message[:1], memoryview(message)[1:]
        if flag not in (MORE, LAST) or (flag == MORE and not chunk):
            raise MalformedMessage("a chunk of a frame, got something else")
        self._size += len(chunk)
        limit = self._find_limit()
        if self._size > limit:
            raise FrameTooLarge(f"a frame of at most {limit} bytes, got a larger one")
        if self._file is None:
            self._file = self._open_file()
        self._file.write(chunk)
        if flag == MORE:
            return None
        file, self._file, self._size = self._file, None, 0
        file.seek(0)
        return file

    def close(self) -> None:
        """Drop a frame that is not complete."""
        if self._file is not None:
            self._file.close()


def open_spooled(folder: Path | None) -> IO[bytes]:
    """Open a file for a frame, which is on disk once it has a second chunk.

    It has no name there, so nothing is left of it when the process ends.
    """
    return SpooledTemporaryFile(CHUNK_BYTES, dir=None if folder is None else str(folder))
