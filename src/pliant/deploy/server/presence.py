"""Who is online: a small file that the run's process writes and other processes read."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from pliant.storage import atomic
from pliant.storage.tail import read_range

PRESENCE_FILE = "presence.json"
MAX_BYTES = 1 << 26  # more than the file of any fleet
WRITE_SECONDS = 2.0  # between two writes
CHANGE_SECONDS = 0.5  # between two writes if something has changed: many may join within a second
LOOK_SECONDS = 5.0  # between two looks at who is online, at most
STALE_SECONDS = 60.0  # after which a look no longer counts, as the server is gone


class Battery(Struct, frozen=True):
    """The state of a device's battery, as the device reports it."""

    charge: float  # from 0 to 1
    is_charging: bool | None = None


class Presence(Struct, frozen=True):
    """When devices were seen, in seconds since 1970."""

    written_at: float = 0.0
    online: tuple[int, ...] = ()  # when the server last looked
    last_seen: dict[int, float] = {}
    batteries: dict[int, Battery] = {}  # of those that have one
    shares: tuple[float, ...] = ()  # of the full network's MACs, of each row of the method's table

    def is_fresh(self, now: float) -> bool:
        """Return whether the server has looked lately."""
        return now - self.written_at < STALE_SECONDS


class PresenceWriter:
    """Note which devices are seen, and write it from time to time."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        *,
        shares: tuple[float, ...] = (),
    ) -> None:
        self._path, self._clock = folder / PRESENCE_FILE, clock
        self._presence, self._last_write = replace(read_presence(folder), shares=shares), 0.0
        self._has_changed = False  # since the last write

    def note_online(self, devices: Collection[int]) -> None:
        """Note all devices that are online now."""
        self._note(tuple(sorted(devices)), devices)

    def note_reply(self, device: int, battery: Battery | None = None) -> None:
        """Note that a device has sent something."""
        is_new = battery not in (None, self._presence.batteries.get(device))
        if is_new:
            batteries = self._presence.batteries | {device: battery}
            self._presence = replace(self._presence, batteries=batteries)
        self._note(tuple(sorted({*self._presence.online, device})), [device], is_new)

    def _note(self, online: tuple[int, ...], seen: Collection[int], is_new: bool = False) -> None:
        now = self._clock()
        self._has_changed |= is_new or online != self._presence.online
        last_seen = self._presence.last_seen | dict.fromkeys(seen, now)
        self._presence = replace(self._presence, written_at=now, online=online, last_seen=last_seen)
        pause = CHANGE_SECONDS if self._has_changed else WRITE_SECONDS
        is_end = self._has_changed and not online  # after which nothing may be noted
        if now - self._last_write >= pause or is_end:
            with suppress(OSError):  # a full disk must not end a round for this
                atomic.write_bytes(self._path, msgspec.json.encode(self._presence), is_private=True)
            self._last_write, self._has_changed = now, False


@contextmanager
def watch_presence(folder: Path, find_online: Callable[[], Collection[int]]) -> Iterator[None]:
    """Note who is online every few seconds while the block runs."""
    writer, is_over = PresenceWriter(folder), threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            writer.note_online(find_online())
            is_over.wait(WRITE_SECONDS)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        writer.note_online(find_online())  # also in a run that is shorter than a look
        writer.note_online(())


def read_presence(folder: Path) -> Presence:
    """Read who was online; nobody, if no server has looked yet."""
    try:
        raw = read_range(folder / PRESENCE_FILE, 0, MAX_BYTES)
        return msgspec.json.decode(raw, type=Presence)
    except (OSError, msgspec.DecodeError):
        return Presence()
