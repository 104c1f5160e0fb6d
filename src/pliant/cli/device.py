"""`pliant device`: run this machine as a device of a federation."""

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.deploy.device.host import Limits


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
    """Connect to a server and train on this machine when it requests it.

    Example: pliant device --server example.org:9092 --number 3 --keys keys

    Args:
        server: HOST:PORT of the server.
        number: This device's number, from 0.
        keys: Folder with ca.crt and devices/NUMBER/key.
        insecure: Use neither TLS nor a key; only for a server on loopback.
        state: Folder for state that survives a restart; by default ~/.pliant/device-NUMBER.
        cpu_share: Largest share of one core that training may use.
        only_when_charging: Do not train on battery.
        data: Data folder on this machine.
        code: Folder of user code that experiments may import; without it, none is run.
    """
    from pliant.deploy.device.host import Limits

    if (keys is None) != insecure:
        raise ValueError("Expected either --keys FOLDER or --insecure")
    if number < 0:
        raise ValueError(f"Expected --number from 0, got {number}")
    if not 0 < cpu_share <= 1:
        raise ValueError(f"Expected --cpu-share above 0 and up to 1, got {cpu_share:g}")
    folders = resolve_folder("--data", data), resolve_folder("--code", code)
    limits = Limits(cpu_share, only_when_charging, *folders)
    folder = state or Path.home() / ".pliant" / f"device-{number}"
    return _run_device(server, number, keys, folder, limits)


def _run_device(server: str, number: int, keys: Path | None, folder: Path, limits: "Limits") -> int:
    from pliant.deploy.security.certificates import find_device_files
    from pliant.deploy.security.probe import parse_server_address, wait_for_server
    from pliant.deploy.settings import ServerChanged
    from pliant.deploy.supervise.child_process import interrupt_on_signal, run_supervisor
    from pliant.deploy.supervise.node import DeviceSupervisor

    logging.basicConfig(level=logging.WARNING, format="pliant: %(message)s")
    ca, key = (None, None) if keys is None else find_device_files(keys, number)
    address = parse_server_address(server, ca, key)
    try:
        with interrupt_on_signal():
            sys.stdout.write(f"device {number} of {server}; press Ctrl-C to stop\n")
            sys.stdout.flush()
            while True:
                kind = wait_for_server(*address, ca)
                supervisor = DeviceSupervisor(kind, number, server, folder, limits, ca=ca, key=key)
                with suppress(ServerChanged), run_supervisor(supervisor):
                    supervisor.watch()
    except KeyboardInterrupt:
        return 130
    return 0


def resolve_folder(option: str, folder: Path | None) -> str | None:
    """Return the absolute path of an option's folder, or None; raise if it does not exist."""
    if folder is not None and not folder.is_dir():
        raise NotADirectoryError(f"Expected an existing folder for {option}, got {folder}")
    return None if folder is None else str(folder.resolve())
