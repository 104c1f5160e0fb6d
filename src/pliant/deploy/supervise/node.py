"""Supervise the processes of a device: one for a split run, and two for a federated one.

Of the two, one holds the connection and a worker trains. Nothing here imports torch: a waiting
device stays small.
"""

import logging
import shutil
import tempfile
import time
from pathlib import Path
from secrets import token_hex

from msgspec.structs import replace

from pliant.deploy.device.host import DeviceSetup, Limits
from pliant.deploy.security.probe import parse_server_address
from pliant.deploy.settings import EXIT_CHANGED, EXIT_REFUSED, ServerChanged
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    make_command,
    make_process_env,
    read_log_tail,
    require_transport,
)
from pliant.deploy.supervise.supervisor import Reaction, Service, Supervisor
from pliant.deploy.versions import ServerKind

log = logging.getLogger("pliant")

POLL_SECONDS = 0.2


class DeviceSupervisor(Supervisor):
    """Run one device of a federation on this machine."""

    def __init__(
        self,
        kind: ServerKind,
        number: int,
        server: str,
        folder: Path,
        limits: Limits,
        *,
        ca: Path | None = None,
        key: Path | None = None,
        worker: str = "pliant.deploy.device.worker",  # the module of a federated worker
    ) -> None:
        require_transport(kind)
        parse_server_address(server, ca, key)
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.number, self.limits = number, limits
        self._has_ended = False
        ca_path, key_path = (None if path is None else str(path.resolve()) for path in (ca, key))
        setup = DeviceSetup(number, str(folder), limits, server, ca_path, key_path)
        # not in the state folder, as the path of a socket must be short
        socket_folder = tempfile.mkdtemp(prefix="pliant-")
        setup = replace(setup, process=token_hex(8), socket=f"{socket_folder}/worker")
        modules = {
            "split": {"worker": "pliant.deploy.grpc.device_main"},
            "federated": {"supernode": "pliant.deploy.flower.node", "worker": worker},
            "federated_grpc": {"node": "pliant.deploy.grpc.node", "worker": worker},
        }[kind]
        super().__init__(folder, "device.lock", _make_services(setup, modules))
        self._on_close.callback(shutil.rmtree, socket_folder, ignore_errors=True)

    def watch(self) -> None:
        """Keep the processes running.

        Raise PermissionError if the server refuses the device, and `ServerChanged` if it runs
        another kind of method now.
        """
        while True:
            self.check()
            time.sleep(POLL_SECONDS)

    def restart_dead(self) -> None:
        """Restart dead processes; log once that the device has ended for good."""
        if self._has_ended:
            return
        try:
            self.check()
        except (PermissionError, ChildProcessError, ServerChanged) as error:
            self._has_ended = True
            log.warning("device %s ended: %s", self.number, error)


def _make_services(setup: DeviceSetup, modules: dict[str, str]) -> list[Service]:
    """Return the services of a device; a worker beside another process runs when it is wanted."""
    wanted = Path(f"{setup.socket}.wanted")  # beside the worker's socket

    def make_service(name: str, module: str) -> Service:
        log_path = Path(setup.folder) / "logs" / f"{name}.log"
        heartbeat = Path(setup.socket).with_name(f"{name}.heartbeat")

        def start() -> ChildProcess:
            for path in (wanted, heartbeat):
                path.unlink(missing_ok=True)
            env = make_process_env(Path(setup.folder) / "flower")
            command = make_command(module, replace(setup, heartbeat=str(heartbeat)))
            return ChildProcess(command, log_path, env)

        def react(exit_code: int | None) -> Reaction:
            if exit_code == EXIT_REFUSED:
                raise PermissionError(read_log_tail(log_path, 1))
            if exit_code == EXIT_CHANGED:
                raise ServerChanged(read_log_tail(log_path, 1))
            if exit_code == 0 and len(modules) > 1:  # the worker was idle
                return Reaction.RETRY if wanted.exists() else Reaction.WAIT
            return Reaction.RESTART

        title = f"device {setup.device}: {name}"
        return Service(
            name, title, start, log_path, react, is_log_forwarded=True, heartbeat=heartbeat
        )

    return [make_service(name, module) for name, module in modules.items()]
