"""Replies between their arrival and the end of their round: a few in memory, the rest on disk.

Which updates are merged is known when a round closes, and in which order: that of the devices, so
that a round has one result. Until then each is checked as it comes and put aside; then they are
read, checked again and merged one by one. So the memory of a server does not grow with the devices
of a round.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from pliant.deploy.server.replies import CheckedReply, RawReply, SentRequest, check_reply
from pliant.engine.round_loop import Run
from pliant.methods.aggregation import remove_tensors
from pliant.methods.base import Update

MEMORY_BYTES = 64_000_000  # of replies that are kept in memory


class ReplyStore:
    """The replies of one round whose updates may be merged."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MEMORY_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._updates: dict[int, Update] = {}  # by device, in memory
        self._size = 0  # of those
        self._files: dict[int, IO[bytes]] = {}  # by device, without a name on the disk

    def clear(self) -> None:
        """Forget the replies of a round."""
        for file in self._files.values():
            file.close()
        self._updates, self._size, self._files = {}, 0, {}

    def keep(self, message: RawReply, reply: CheckedReply) -> CheckedReply:
        """Put an update aside; return its reply without tensors."""
        if reply.update is None or message.raw is None:
            return reply
        if self._size + reply.size <= self._max_bytes:
            self._updates[reply.device] = reply.update
            self._size += reply.size
        else:
            self._files[reply.device] = TemporaryFile(dir=self._folder)  # noqa: SIM115 # kept
            self._files[reply.device].write(message.raw)
        return replace(reply, update=remove_tensors(reply.update))

    def iter_updates(
        self, run: Run, requests: Iterable[SentRequest], arrivals: dict[int, float]
    ) -> Iterator[Update]:
        """Yield the updates that these requests led to, each of which was valid when it came."""
        for request in requests:
            device = request.key.device
            if device in self._updates:
                yield self._updates.pop(device)
                continue
            with self._files.pop(device) as file:
                file.seek(0)
                message = RawReply(device, file.read())
            update = check_reply(run, request, message, arrivals[device]).update
            if update is None:
                raise RuntimeError(f"device {device}: its reply has changed on the disk")
            yield update
