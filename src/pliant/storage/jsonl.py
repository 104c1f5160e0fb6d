"""Append-only JSON lines under a header line with the format number."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from pliant.storage.formats import FileFormat

R = TypeVar("R")


class JsonlHeader(msgspec.Struct, frozen=True, tag="header"):
    """The first line of a file."""

    format: int


class JsonlWriter:
    """An append-only file of JSON lines; opening it removes a last line that a kill cut short."""

    def __init__(self, path: Path, file_format: FileFormat) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        if size := count_complete_bytes(path):
            with open(path, "rb") as file:
                self._header_size = check_header(file, path, file_format)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by close()
        if self._file.tell() != size:
            self._file.truncate(size)
            self._file.seek(size)
        if not size:
            self.append(JsonlHeader(file_format.number))
            self._header_size = self._file.tell()

    def append(self, record: Any) -> None:
        """Write one record as one line and hand it to the operating system."""
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Force all records to disk and return the file's size, which a checkpoint stores."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def rewind(self, position: int) -> None:
        """Drop all records after a position, which a resumed run will write again."""
        if position > self._file.tell():
            raise ValueError(
                f"{self.path}: expected at least {position} bytes, got {self._file.tell()}"
            )
        self._file.truncate(max(position, self._header_size))
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def count_complete_bytes(path: Path) -> int:
    """Return the size of a file without an unfinished last line."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        end = path.stat().st_size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def read_jsonl(path: Path, record_type: type[R], file_format: FileFormat) -> Iterator[R]:
    """Yield the records of a file, without an unfinished last line."""
    decoder = msgspec.json.Decoder(record_type)
    with open(path, "rb") as file:
        if not check_header(file, path, file_format):
            return
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def check_header(file: BinaryIO, path: Path, file_format: FileFormat) -> int:
    """Check the header line and return its size; 0 if it is not yet complete."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return 0
    try:
        header = msgspec.json.decode(line, type=JsonlHeader)
    except msgspec.DecodeError:
        file_format.check(None, path)
        raise
    file_format.check(header.format, path)
    return len(line)
