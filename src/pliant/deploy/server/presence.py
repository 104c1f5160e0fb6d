"""Who is online: a small file that the run's process writes and other processes read."""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from pliant.storage import atomic

PRESENCE_FILE = "presence.json"
WRITE_SECONDS = 2.0  # between two writes


class Presence(Struct, frozen=True):
    """When devices were seen, in seconds since 1970."""

    written_at: float = 0.0
    online: tuple[int, ...] = ()  # when the server last looked
    last_seen: dict[int, float] = {}


class PresenceWriter:
    """Note which devices are seen, and write it from time to time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = folder / PRESENCE_FILE, clock
        self._presence, self._last_write = read_presence(folder), 0.0

    def note_online(self, devices: Collection[int]) -> None:
        """Note all devices that are online now."""
        self._note(tuple(sorted(devices)), devices)

    def note_reply(self, device: int) -> None:
        """Note that a device has sent something."""
        self._note(tuple(sorted({*self._presence.online, device})), [device])

    def _note(self, online: tuple[int, ...], seen: Collection[int]) -> None:
        now, is_new = self._clock(), online != self._presence.online
        last_seen = self._presence.last_seen | dict.fromkeys(seen, now)
        self._presence = Presence(now, online, last_seen)
        if is_new or now - self._last_write >= WRITE_SECONDS:
            with suppress(OSError):  # a full disk must not end a round for this
                atomic.write_bytes(self._path, msgspec.json.encode(self._presence), is_private=True)
            self._last_write = now


def read_presence(folder: Path) -> Presence:
    """Read who was online; nobody, if no server has looked yet."""
    try:
        return msgspec.json.decode((folder / PRESENCE_FILE).read_bytes(), type=Presence)
    except (FileNotFoundError, msgspec.DecodeError):
        return Presence()
