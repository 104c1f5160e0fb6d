"""Read this machine's CPU quota, load, battery and temperature, and apply its owner's limits."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from msgspec import Meta, Struct

from pliant import runtime
from pliant.value import Count, Positive, Value

THERMAL = Path("/sys/class/thermal")
HOT_CELSIUS = 95.0  # where a machine does not report its own limit


class ReportableProblem(ValueError):
    """A problem that the server is told; its text names nothing of this device."""


class Limits(Value, frozen=True):
    """Limits set by the device's owner."""

    cpu_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0  # of one core, while training
    only_when_charging: bool = False
    data: str | None = None  # folder of this device's data; in a rehearsal, of the data sets
    code: str | None = None  # folder of the owner's `file.py:function`
    dataset: str | None = None  # `file.py:function` that returns this device's data
    test_share: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.2  # if its data come in one part
    max_samples: Count | None = None  # to train on in a round; None: as many as there are at first
    hide_classes: bool = False  # from the server
    disk_quota: Positive = 1e9  # bytes, of the states of experiments

    def find_refusal(self, host: "HostStatus") -> str | None:
        """Return why the device may not train now, if it may not."""
        is_refused = self.only_when_charging and host.is_charging is False
        return "it is not charging" if is_refused else None

    def compute_cpu_share(self, host: "HostStatus") -> float:
        """Return the share of a core to use: the owner's limit, halved on a hot machine."""
        return self.cpu_share * (0.5 if host.is_hot else 1.0)

    def estimate_slowdown(self, host: "HostStatus") -> float:
        """Estimate, before any is measured, how much longer than calibrated mini-batches will take.

        >>> from pliant.deploy.device.host import HostStatus, Limits
        >>> host = HostStatus(cores=0.5, load=0.2, is_charging=None, is_hot=False)
        >>> Limits().estimate_slowdown(host), Limits(cpu_share=0.25).estimate_slowdown(host)
        (2.0, 8.0)
        """
        return max(1.0, host.load or 0.0) / min(1.0, host.cores) / self.compute_cpu_share(host)


class DeviceSetup(Struct, frozen=True):
    """The arguments of a device's process: Flower's worker, or the client of a split run."""

    device: int
    folder: str  # for everything that must survive a restart
    limits: Limits
    server: str = ""
    ca: str | None = None
    key: str | None = None
    process: str = ""  # names the process of a split device; stays the same after a restart
    socket: str = ""  # of Flower's worker
    heartbeat: str = ""  # file to touch
    idle_seconds: float = 120.0  # without a request, after which the worker releases its memory


@dataclass(frozen=True)
class HostStatus:
    """Readings that need no measurement; None where the machine does not report one."""

    cores: float  # available to this process: affinity and container quota
    load: float | None  # runnable processes per core, over a minute
    is_charging: bool | None
    is_hot: bool
    charge: float | None = None  # of the battery, from 0 to 1


def read_host(cgroup: Path = runtime.CGROUP, thermal: Path = THERMAL) -> HostStatus:
    battery: Any = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return HostStatus(
        runtime.measure_cores(cgroup),
        os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None,
        None if battery is None else battery.power_plugged,
        is_hot(thermal),
        None if battery is None else round(battery.percent) / 100,
    )


def is_hot(thermal: Path = THERMAL) -> bool:
    """Return whether a thermal zone has reached the limit at which it throttles the machine."""
    for zone in thermal.glob("thermal_zone*"):
        try:
            celsius = int((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):
            continue
        if celsius >= _read_hot_limit(zone):
            return True
    return False


def _read_hot_limit(zone: Path) -> float:
    for path in zone.glob("trip_point_*_type"):
        try:
            if path.read_text().strip() in ("passive", "hot"):
                return int(Path(str(path).replace("_type", "_temp")).read_text()) / 1000
        except (OSError, ValueError):
            continue
    return HOT_CELSIUS
