"""`pliant device`: this machine as a device of a federation."""

import logging
import signal
import sys
from pathlib import Path
from types import FrameType


def device(
    *,
    server: str,
    number: int,
    keys: Path | None = None,
    insecure: bool = False,
    state: Path | None = None,
    cpu_share: float = 1.0,
    only_when_charging: bool = False,
    data: Path | None = None,
    code: Path | None = None,
) -> int:
    """Train on this machine whenever the server asks for it.

    Example: pliant device --server example.org:9092 --number 3 --keys keys

    Parameters
    ----------
    server
        HOST:PORT of the server.
    number
        This device's number, from 0.
    keys
        Folder with ca.crt and devices/NUMBER/key.
    insecure
        Neither TLS nor a key; for a server on loopback only.
    state
        Folder for what must survive a restart; .pliant/device-NUMBER in the home folder by default.
    cpu_share
        The most of one core that training may take.
    only_when_charging
        Decline to train while on battery.
    data
        Folder of data sets on this machine.
    code
        Folder of the Python files that an experiment may name; without it none is run.
    """
    from pliant.deploy.door import awaited, need_address
    from pliant.deploy.host import Limits
    from pliant.deploy.remote import RemoteDevice
    from pliant.deploy.split_node import SplitRemoteDevice

    if (keys is None) != insecure:
        raise ValueError("Expected either --keys FOLDER or --insecure")
    if number < 0:
        raise ValueError(f"Expected a number from 0, got {number}")
    logging.basicConfig(level=logging.WARNING, format="pliant: %(message)s")
    limits = Limits(
        cpu_share, only_when_charging, str(data) if data else None, str(code) if code else None
    )
    folder = state or Path.home() / ".pliant" / f"device-{number}"
    ca = keys / "ca.crt" if keys else None
    key = keys / "devices" / str(number) / "key" if keys else None
    place = need_address(server, ca, key)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        sys.stdout.write(f"device {number} at {server}; Ctrl-C ends it\n")
        sys.stdout.flush()
        kind = SplitRemoteDevice if awaited(*place, ca) == "split" else RemoteDevice
        with kind(number, server, folder, limits, ca=ca, key=key) as running:
            running.watch()
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
