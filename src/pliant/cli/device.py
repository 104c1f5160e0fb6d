"""`pliant device`: this machine as a device of a federation."""

import logging
import sys
from pathlib import Path


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
    from pliant.deploy.keys import device_files
    from pliant.deploy.processes import endable, kept
    from pliant.deploy.remote import RemoteDevice
    from pliant.deploy.split_node import SplitRemoteDevice

    if (keys is None) != insecure:
        raise ValueError("Expected either --keys FOLDER or --insecure")
    if number < 0:
        raise ValueError(f"Expected --number from 0, got {number}")
    if not 0 < cpu_share <= 1:
        raise ValueError(f"Expected --cpu-share above 0 and up to 1, got {cpu_share:g}")
    limits = Limits(
        cpu_share, only_when_charging, need_folder("--data", data), need_folder("--code", code)
    )
    logging.basicConfig(level=logging.WARNING, format="pliant: %(message)s")
    folder = state or Path.home() / ".pliant" / f"device-{number}"
    ca, key = (None, None) if keys is None else device_files(keys, number)
    place = need_address(server, ca, key)
    try:
        with endable():
            sys.stdout.write(f"device {number} at {server}; Ctrl-C ends it\n")
            sys.stdout.flush()
            kind = SplitRemoteDevice if awaited(*place, ca) == "split" else RemoteDevice
            running = kind(number, server, folder, limits, ca=ca, key=key)
            with kept(running):
                running.watch()
    except KeyboardInterrupt:
        return 130
    return 0


def need_folder(option: str, folder: Path | None) -> str | None:
    """Return the whole path of a folder that an option names, if it does; refuse what is none."""
    if folder is not None and not folder.is_dir():
        raise NotADirectoryError(f"Expected {option} FOLDER that is there, got {folder}")
    return None if folder is None else str(folder.resolve())
