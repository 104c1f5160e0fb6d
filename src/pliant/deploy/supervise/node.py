"""Supervise the processes of a device: one for a split run, and two for Flower.

Flower's SuperNode holds the connection, and a worker trains. Nothing here imports torch: a waiting
device stays small.
"""

import logging
import shutil
import socket
import tempfile
import time
from pathlib import Path
from secrets import token_hex

from msgspec.structs import replace

from pliant.deploy.device.host import DeviceSetup, Limits
from pliant.deploy.security.probe import ServerKind, parse_server_address
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    make_command,
    make_process_env,
    read_log_tail,
    require_transport,
)
from pliant.deploy.supervise.supervisor import SETTLED_SECONDS, Reaction, Service, Supervisor

log = logging.getLogger("pliant")

POLL_SECONDS = 0.2
ADMISSION_SECONDS = 180.0  # in which a server must accept a device
REFUSALS_BEFORE_WARNING = 3  # a server that has just started may not know the keys yet
ACTIVATION_FAILED = "Failed to activate SuperNode"  # in the node's log
REFUSED_MESSAGE = "expected a registered key that no other process uses; the server refused it"


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
        worker: str = "pliant.deploy.device.worker",  # the module of Flower's worker
    ) -> None:
        require_transport(kind)
        parse_server_address(server, ca, key)
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.number, self.limits = number, limits
        self._has_ended = False
        ca_path, key_path = (None if path is None else str(path.resolve()) for path in (ca, key))
        setup = DeviceSetup(number, str(folder), limits, server, ca_path, key_path)
        if kind == "split":
            super().__init__(folder, "device.lock", [_make_split_service(setup)])
        else:  # not in the state folder, as the path of a socket must be short
            socket_folder = tempfile.mkdtemp(prefix="pliant-")
            setup = replace(setup, socket=f"{socket_folder}/worker")
            super().__init__(folder, "device.lock", _FlowerDevice(setup, worker).make_services())
            self._on_close.callback(shutil.rmtree, socket_folder, ignore_errors=True)

    def watch(self) -> None:
        """Keep the processes running; raise PermissionError if the server refuses the device."""
        while True:
            self.check()
            time.sleep(POLL_SECONDS)

    def restart_dead(self) -> None:
        """Restart dead processes; log once that the device has ended for good."""
        if self._has_ended:
            return
        try:
            self.check()
        except (PermissionError, ChildProcessError) as error:
            self._has_ended = True
            log.warning("device %s ended: %s", self.number, error)


def _start_process(setup: DeviceSetup, name: str, command: list[str]) -> ChildProcess:
    env = make_process_env(Path(setup.folder) / "flower")
    return ChildProcess(command, _log_path(setup, name), env)


def _log_path(setup: DeviceSetup, name: str) -> Path:
    return Path(setup.folder) / "logs" / f"{name}.log"


def _make_split_service(setup: DeviceSetup) -> Service:
    setup = replace(setup, process=token_hex(8))
    command = make_command("pliant.deploy.grpc.client", setup)
    log_path = _log_path(setup, "worker")

    def react(exit_code: int | None) -> Reaction:
        if exit_code is None or exit_code >= 0:
            raise PermissionError(read_log_tail(log_path, 1))
        return Reaction.RESTART

    return Service(
        "worker",
        f"device {setup.device}: its process",
        lambda: _start_process(setup, "worker", command),
        log_path,
        react,
        is_log_forwarded=True,
    )


class _FlowerDevice:
    """Flower's SuperNode, and the worker that it wakes up by a file next to the socket."""

    def __init__(self, setup: DeviceSetup, worker: str) -> None:
        self._setup, self._worker = setup, worker
        self._wanted = Path(f"{setup.socket}.wanted")
        self._node_started_at = 0.0
        self._refused_since, self._refusals = 0.0, 0

    def make_services(self) -> list[Service]:
        setup = self._setup
        node = ("supernode", self._start_node, self._react_to_end_of_node)
        worker = ("worker", self._start_worker, self._react_to_end_of_worker)
        return [
            Service(name, f"device {setup.device}: {name}", start, _log_path(setup, name), react)
            for name, start, react in (node, worker)
        ]

    def _start_node(self) -> ChildProcess:
        setup = self._setup
        command = ["flower-supernode", "--superlink", setup.server]
        command += ["--host", "127.0.0.1", "--port", str(_find_free_port())]
        command += ["--node-config", f'device={setup.device} socket="{setup.socket}"']
        if setup.ca is None or setup.key is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", setup.ca]
            command += ["--auth-supernode-private-key", setup.key]
        self._node_started_at = time.monotonic()
        return _start_process(setup, "supernode", command)

    def _react_to_end_of_node(self, exit_code: int | None) -> Reaction:
        """Count refusals: Flower may refuse a restarted node for a minute."""
        now, name = time.monotonic(), f"device {self._setup.device}"
        if now - self._node_started_at >= SETTLED_SECONDS:
            self._refusals = 0
        if ACTIVATION_FAILED not in read_log_tail(_log_path(self._setup, "supernode"), 30):
            return Reaction.RESTART
        self._refused_since = self._refused_since if self._refusals else now
        self._refusals += 1
        if self._refusals == REFUSALS_BEFORE_WARNING:
            log.warning("%s: %s; retrying", name, REFUSED_MESSAGE)
        if now - self._refused_since > ADMISSION_SECONDS:
            raise PermissionError(f"{name}: {REFUSED_MESSAGE} for {ADMISSION_SECONDS:g} s")
        return Reaction.RETRY

    def _start_worker(self) -> ChildProcess:
        self._wanted.unlink(missing_ok=True)
        return _start_process(self._setup, "worker", make_command(self._worker, self._setup))

    def _react_to_end_of_worker(self, exit_code: int | None) -> Reaction:
        if exit_code:
            return Reaction.RESTART
        return Reaction.RETRY if self._wanted.exists() else Reaction.WAIT


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
