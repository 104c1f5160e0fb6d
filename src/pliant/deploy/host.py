"""What this machine says of itself: CPU quota, load, battery, heat; and what its user allows."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from msgspec import Meta

from pliant.value import Value

CGROUP = Path("/sys/fs/cgroup")
THERMAL = Path("/sys/class/thermal")
HOT = 95.0  # degrees Celsius, where a machine does not name its own limit


class Limits(Value, frozen=True):
    """What a user lets a device do."""

    cpu_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0  # of one core, while it trains
    only_when_charging: bool = False
    data: str | None = None  # folder of the data sets on this device
    code: str | None = None  # folder of the user's own `file.py:function`


@dataclass(frozen=True)
class Hints:
    """What can be known without measuring; None where the machine does not tell."""

    cores: float  # that this process may use: affinity and container quota
    load: float | None  # runnable processes per core, over a minute
    battery: float | None  # share that is left
    is_charging: bool | None
    is_hot: bool


def hints(cgroup: Path = CGROUP, thermal: Path = THERMAL) -> Hints:
    """Ask the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = float(count or 1)
    quota = cpu_quota(cgroup)
    battery: Any = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return Hints(
        cores if quota is None else min(cores, quota),
        os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None,
        None if battery is None else battery.percent / 100,
        None if battery is None else battery.power_plugged,
        is_hot(thermal),
    )


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many cores a container may use, by cgroup v2 or v1; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return share if share > 0 else None


def is_hot(thermal: Path = THERMAL) -> bool:
    """Tell whether a thermal zone has come to the limit at which it slows the machine down."""
    for zone in thermal.glob("thermal_zone*"):
        try:
            now = int((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):
            continue
        if now >= _limit(zone):
            return True
    return False


def _limit(zone: Path) -> float:
    for kind in zone.glob("trip_point_*_type"):
        try:
            if kind.read_text().strip() in ("passive", "hot"):
                return int(Path(str(kind).replace("_type", "_temp")).read_text()) / 1000
        except (OSError, ValueError):
            continue
    return HOT


def refusal(limits: Limits, found: Hints) -> str | None:
    """Return why a device must not train now, or None."""
    if limits.only_when_charging and found.is_charging is False:
        return "it is not charging"
    return None


def allowed_share(limits: Limits, found: Hints) -> float:
    """Return the share of a core to use: what the user allows, and half of it on a hot machine."""
    return limits.cpu_share * (0.5 if found.is_hot else 1.0)


def expected_slowdown(limits: Limits, found: Hints) -> float:
    """Return how much longer than calibrated mini-batches may take, before any was measured.

    >>> from pliant.deploy.host import Hints, Limits, expected_slowdown
    >>> found = Hints(cores=0.5, load=0.2, battery=None, is_charging=None, is_hot=False)
    >>> expected_slowdown(Limits(), found), expected_slowdown(Limits(cpu_share=0.25), found)
    (2.0, 8.0)
    """
    return max(1.0, found.load or 0.0) / min(1.0, found.cores) / allowed_share(limits, found)
