"""The devices of a run as its operator sees them: who is online, how fast, and how tasks end.

Pages read it too, so importing this does not load torch.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from pliant.deploy.server.presence import Battery, Presence, read_presence
from pliant.deploy.server.run_totals import DeviceTotals, TotalsReader
from pliant.storage.run_dir import read_config


class DeviceSummary(Struct, frozen=True):
    """One device of a run; times are seconds since 1970."""

    device: int
    online: bool
    last_seen: float | None = None
    battery: Battery | None = None  # None: it has none, or has not reported it
    speed: float | None = None  # MAC/s
    rows: tuple[int, int] | None = None  # of the method's table, first and last of its last task
    shares: tuple[float, float] | None = None  # of the full network's MACs, the same
    merged: int = 0  # tasks
    late: int = 0
    rejected: int = 0
    last_round: int = 0
    last_outcome: str = ""


class FleetStatus(Struct, frozen=True):
    """All devices of a run that have been seen."""

    time: float  # of this status
    seen_at: float  # when the server last looked; 0: never
    is_live: bool  # the server has looked lately
    is_finished: bool
    rounds: int
    planned: int
    size: int  # of the fleet
    online: int
    devices: list[DeviceSummary]


class StatusReader:
    """Read the status of the run in a folder, again and again; each record is read once."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self._clock = folder, clock
        self._config: dict[str, Any] = read_config(folder)
        self._totals = TotalsReader(folder)

    def read_more(self) -> bool:
        """Read the next part of the records and return whether there was one."""
        return self._totals.read_more()

    def read(self) -> FleetStatus:
        """Return the status with all records so far."""
        totals, presence, now = self._totals.read(), read_presence(self.folder), self._clock()
        is_live = presence.is_fresh(now)
        numbers = sorted({*totals.devices, *presence.last_seen})
        devices = [
            _summarise_device(number, totals.devices.get(number), presence, is_live)
            for number in numbers
        ]
        return FleetStatus(
            now,
            presence.written_at,
            is_live,
            totals.last_round is not None and totals.last_round.digest is not None,
            totals.rounds,
            self._config["rounds"],
            self._config["fleet"]["size"],
            sum(device.online for device in devices),
            devices,
        )


def _summarise_device(
    number: int, totals: DeviceTotals | None, presence: Presence, is_live: bool
) -> DeviceSummary:
    totals, shares = totals or DeviceTotals(), presence.shares
    outcomes, rows = totals.outcomes, totals.rows
    has_shares = rows is not None and rows[1] < len(shares)
    return DeviceSummary(
        number,
        is_live and number in presence.online,
        presence.last_seen.get(number),
        presence.batteries.get(number),
        totals.speed,
        rows,
        (shares[rows[0]], shares[rows[1]]) if has_shares and rows else None,
        outcomes["finished"] + outcomes["partial"],
        outcomes["late"],
        outcomes["rejected"],
        totals.last_round,
        totals.last_outcome,
    )
