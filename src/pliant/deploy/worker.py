"""The resident worker of a device: it holds the network between rounds and answers letters.

It is a process of its own (`python -m pliant.deploy.worker SETUP`), so that a crash in training
leaves the device connected, and so that its memory is given back when it has been idle for long.
"""

import os
import struct
import sys
import time
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from pliant import memory
from pliant.deploy.host import Limits

if TYPE_CHECKING:
    from pliant.deploy.device import Device

CAME = struct.Struct("<d")  # before a letter: when it came, by this machine's monotonic clock


class Setup(Struct, frozen=True):
    """What a worker is told when it is started."""

    device: int
    folder: str  # where it keeps what must survive
    socket: str
    limits: Limits
    idle_seconds: float


def work(setup: Setup, kind: "type[Device] | None" = None) -> None:
    """Answer letters until nobody has asked for long."""
    from pliant.deploy.device import Device, single_threaded

    single_threaded()
    memory.keep()
    path = Path(setup.socket)
    path.unlink(missing_ok=True)
    device = (kind or Device)(setup.device, Path(setup.folder), setup.limits)
    with Listener(setup.socket, family="AF_UNIX") as listener:
        path.chmod(0o600)
        _end_when_idle(listener, setup.idle_seconds)
        free = 0.0  # since when there was nothing to do
        while True:
            try:
                link = listener.accept()
            except TimeoutError:
                return
            with link:
                try:
                    raw = link.recv_bytes()
                    (came,) = CAME.unpack_from(raw)
                    answer = device.answer(raw[CAME.size :], queued=max(0.0, free - came))
                    free = time.monotonic()
                    link.send_bytes(answer)
                    memory.give_back()
                except (EOFError, OSError, struct.error):  # who asked has gone
                    continue


def _end_when_idle(listener: Listener, seconds: float) -> None:
    inner = listener._listener._socket  # type: ignore[attr-defined] # there is no public way
    inner.settimeout(seconds)


if __name__ == "__main__":
    work(msgspec.json.decode(sys.argv[1].encode(), type=Setup))
    os._exit(0)  # torch takes its time to leave
