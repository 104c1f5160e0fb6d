"""The messages that the server has trained on in a round, from which it can train again."""

from collections.abc import Iterator, Mapping
from tempfile import SpooledTemporaryFile

import msgspec

from pliant.split.payload import Message

MAX_MEMORY_BYTES = 256 * 1024 * 1024  # beyond which the messages are on disk
_LENGTH_BYTES = 8


class MessageLog:
    """The server's steps of a round: the learning rate and the messages of each, in order."""

    def __init__(self) -> None:
        self.clients: set[int] = set()
        self._file = SpooledTemporaryFile(MAX_MEMORY_BYTES)  # noqa: SIM115 # as long as this

    def __del__(self) -> None:
        self._file.close()

    def append(self, lr: float, messages: Mapping[int, Message]) -> None:
        raw = msgspec.msgpack.encode((lr, messages))
        self._file.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
        self.clients.update(messages)

    def __iter__(self) -> Iterator[tuple[float, dict[int, Message]]]:
        self._file.seek(0)
        while head := self._file.read(_LENGTH_BYTES):
            raw = self._file.read(int.from_bytes(head, "little"))
            yield msgspec.msgpack.decode(raw, type=tuple[float, dict[int, Message]])
