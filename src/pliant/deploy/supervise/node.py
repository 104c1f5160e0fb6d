"""Supervise the processes of a device: one for a split run, and two for Flower.

Flower's SuperNode holds the connection, and a worker trains. Nothing here imports torch: a waiting
device stays small.
"""

import logging
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import msgspec

from pliant.deploy.device.host import Limits
from pliant.deploy.device.worker import DeviceWorkerSetup
from pliant.deploy.grpc.device_main import SplitDeviceSetup
from pliant.deploy.security.probe import ServerKind, parse_server_address
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    find_script,
    make_command,
    make_process_env,
    read_log_tail,
    require_transport,
)
from pliant.deploy.supervise.supervisor import SETTLED_SECONDS, Reaction, Service, Supervisor

log = logging.getLogger("pliant")

POLL_SECONDS = 0.2
IDLE_SECONDS = 120.0  # without a request, after which the worker exits to release its memory
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
        cpu: int | None = None,
        worker: Sequence[str] = ("-m", "pliant.deploy.device.worker"),  # arguments of Python
    ) -> None:
        require_transport(kind)
        parse_server_address(server, ca, key)
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.number, self.limits = number, limits
        self._has_ended = False
        ca, key = (None if path is None else path.resolve() for path in (ca, key))
        device = _Device(number, server, folder, limits, ca, key, cpu)
        on_close = ExitStack()
        if kind == "split":
            services = [_make_split_service(device)]
        else:  # not in the state folder, as the path of a socket must be short
            socket_folder = Path(tempfile.mkdtemp(prefix="pliant-"))
            on_close.callback(shutil.rmtree, socket_folder, ignore_errors=True)
            services = _FlowerDevice(device, worker, str(socket_folder / "worker")).make_services()
        super().__init__(folder, "device.lock", services, on_close=on_close)

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


@dataclass(frozen=True)
class _Device:
    number: int
    server: str
    folder: Path
    limits: Limits
    ca: Path | None
    key: Path | None
    cpu: int | None

    def start_process(self, name: str, command: list[str]) -> ChildProcess:
        if self.cpu is not None:
            command = ["taskset", "-c", str(self.cpu), *command]
        env = {**make_process_env(self.folder / "flower"), "PLIANT_DEVICE": str(self.number)}
        return ChildProcess(command, self.log_path(name), env)

    def log_path(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def _make_split_service(device: _Device) -> Service:
    ca, key = (None if path is None else str(path) for path in (device.ca, device.key))
    setup = SplitDeviceSetup(
        device.number, device.server, str(device.folder), device.limits, token_hex(8), ca, key
    )
    command = make_command("pliant.deploy.grpc.device_main", setup)
    log_path = device.log_path("worker")

    def react(exit_code: int | None) -> Reaction:
        if exit_code is None or exit_code >= 0:
            raise PermissionError(read_log_tail(log_path, 1))
        return Reaction.RESTART

    return Service(
        "worker",
        f"device {device.number}: its process",
        lambda: device.start_process("worker", command),
        log_path,
        react,
        is_log_forwarded=True,
    )


class _FlowerDevice:
    """Flower's SuperNode, and the worker that it wakes up by a file next to the socket."""

    def __init__(self, device: _Device, worker: Sequence[str], socket: str) -> None:
        self._device, self._worker, self._socket = device, worker, socket
        self._wanted = Path(f"{socket}.wanted")
        self._node_started_at = 0.0
        self._refused_since, self._refusals = 0.0, 0

    def make_services(self) -> list[Service]:
        device = self._device
        node = ("supernode", self._start_node, self._react_to_end_of_node)
        worker = ("worker", self._start_worker, self._react_to_end_of_worker)
        return [
            Service(name, f"device {device.number}: {name}", start, device.log_path(name), react)
            for name, start, react in (node, worker)
        ]

    def _start_node(self) -> ChildProcess:
        device = self._device
        command = [find_script("flower-supernode"), "--superlink", device.server]
        command += ["--host", "127.0.0.1", "--port", str(_find_free_port())]
        command += ["--node-config", f'device={device.number} socket="{self._socket}"']
        if device.ca is None or device.key is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(device.ca)]
            command += ["--auth-supernode-private-key", str(device.key)]
        self._node_started_at = time.monotonic()
        return device.start_process("supernode", command)

    def _react_to_end_of_node(self, exit_code: int | None) -> Reaction:
        """Count refusals: Flower may refuse a restarted node for a minute."""
        device, now = self._device, time.monotonic()
        if now - self._node_started_at >= SETTLED_SECONDS:
            self._refusals = 0
        if ACTIVATION_FAILED not in read_log_tail(device.log_path("supernode"), 30):
            return Reaction.RESTART
        self._refused_since = self._refused_since if self._refusals else now
        self._refusals += 1
        if self._refusals == REFUSALS_BEFORE_WARNING:
            log.warning("device %s: %s; retrying", device.number, REFUSED_MESSAGE)
        if now - self._refused_since > ADMISSION_SECONDS:
            raise PermissionError(
                f"device {device.number}: {REFUSED_MESSAGE} for {ADMISSION_SECONDS:g} s"
            )
        return Reaction.RETRY

    def _start_worker(self) -> ChildProcess:
        device = self._device
        self._wanted.unlink(missing_ok=True)
        setup = DeviceWorkerSetup(
            device.number, str(device.folder), self._socket, device.limits, IDLE_SECONDS
        )
        command = [sys.executable, *self._worker, msgspec.json.encode(setup).decode()]
        return device.start_process("worker", command)

    def _react_to_end_of_worker(self, exit_code: int | None) -> Reaction:
        if exit_code:
            return Reaction.RESTART
        return Reaction.RETRY if self._wanted.exists() else Reaction.WAIT


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
