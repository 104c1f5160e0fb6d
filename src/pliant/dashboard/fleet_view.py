"""The devices of deployments for the page, as `pliant server status` lists them."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from pliant.deploy.server.fleet_status import FleetStatus, StatusReader
from pliant.deploy.server.presence import PRESENCE_FILE

MAX_DEVICES = 1000  # per message
MAX_READERS = 48  # runs whose totals are held in memory


class FleetViews:
    """Read the devices of those runs of a folder that are deployments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._readers: OrderedDict[str, StatusReader] = OrderedDict()

    def read_more(self, name: str) -> bool:
        """Read the next part of a run's records and return whether there was one."""
        reader = self._find_reader(name)
        return reader is not None and reader.read_more()

    def read(self, name: str) -> FleetStatus | None:
        """Return the status of a run's devices; None if it is not a deployment."""
        reader = self._find_reader(name)
        return None if reader is None else reader.read()

    def _find_reader(self, name: str) -> StatusReader | None:
        folder = self._folder / name
        if not (folder / PRESENCE_FILE).is_file() or (folder / PRESENCE_FILE).is_symlink():
            return None
        if name not in self._readers:
            self._readers[name] = StatusReader(folder)
            while len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(name)
        return self._readers[name]


def describe_fleet(fleet: FleetStatus) -> dict[str, Any]:
    """Return what the page gets: the whole fleet in numbers, and its devices up to a limit."""
    totals = {
        key: sum(getattr(device, key) for device in fleet.devices)
        for key in ("merged", "late", "rejected")
    }
    message: dict[str, Any] = msgspec.to_builtins(fleet)
    devices = message["devices"][:MAX_DEVICES]
    return message | totals | {"known": len(fleet.devices), "devices": devices}


def is_news(fleet: FleetStatus, sent: FleetStatus | None) -> bool:
    """Return whether a status differs from the one that was sent, apart from its time."""
    return sent is None or msgspec.structs.replace(fleet, time=sent.time) != sent
