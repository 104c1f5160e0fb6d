"""Supervise the processes of a device: Flower's SuperNode and the worker that trains."""

import logging
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from pliant.deploy.device.host import Limits
from pliant.deploy.device.worker import DeviceWorkerSetup
from pliant.deploy.security.probe import check_address
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    find_script,
    make_process_env,
    require_flower,
)
from pliant.storage.run_lock import RunLock

log = logging.getLogger("pliant")

IDLE_SECONDS = 120.0  # without a request, after which the worker exits to release its memory
ADMISSION_SECONDS = 180.0  # in which a server must accept a device
REFUSALS_BEFORE_WARNING = 3  # a server that has just started may not know the keys yet
SETTLED_SECONDS = 30.0  # after which a running node counts as accepted
RESTART_SECONDS = 5.0  # before a node is restarted, which Flower may refuse for a minute
ACTIVATION_FAILED = "Failed to activate SuperNode"  # in the node's log
REFUSED_MESSAGE = "expected a registered key that no other process uses; the server refused it"


class FlowerDeviceSupervisor:
    """Run one device of a federation on this machine."""

    worker_arguments = ("-m", "pliant.deploy.device.worker")

    def __init__(
        self,
        number: int,
        server: str,
        folder: Path,
        limits: Limits,
        *,
        ca: Path | None = None,
        key: Path | None = None,
        idle_seconds: float = IDLE_SECONDS,
        cpu: int | None = None,
    ) -> None:
        require_flower()
        check_address(server, ca, key)
        self.number, self._server = number, server
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ca, self._key = ca, key
        self.limits, self._idle_seconds, self._cpu = limits, idle_seconds, cpu
        self._env = make_process_env(self._folder / "flower")
        # not in the state folder, as the path of a socket must be short
        self._socket_folder = Path(tempfile.mkdtemp(prefix="pliant-"))
        self._socket = str(self._socket_folder / "worker")
        self._children: dict[str, ChildProcess] = {}
        self._dead_since: dict[str, float] = {}
        self._node_started_at = 0.0
        self._refused_since: float | None = None
        self._refusal_count = 0
        self._lock: RunLock | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Return the running processes."""
        return {name: child.process.pid for name, child in self._children.items() if child.is_alive}

    def start(self) -> None:
        """Start the worker and the node."""
        self._lock = RunLock(self._folder, "device.lock")
        self._start_worker()
        self._start_node()

    def watch(self) -> None:
        """Keep the processes running until the server has refused the device for too long."""
        while True:
            self.restart_dead()
            refused_since = self._refused_since
            if refused_since and time.monotonic() - refused_since > ADMISSION_SECONDS:
                raise PermissionError(
                    f"device {self.number}: {REFUSED_MESSAGE} for {ADMISSION_SECONDS:g} s"
                )
            time.sleep(0.2)

    def restart_dead(self) -> None:
        """Restart dead processes: the worker at once, the node after a delay."""
        now = time.monotonic()
        for name, start in (("worker", self._start_worker), ("supernode", self._start_node)):
            child = self._children.get(name)
            if child is not None and child.is_alive:
                self._dead_since.pop(name, None)
                if name == "supernode" and now - self._node_started_at > SETTLED_SECONDS:
                    self._refused_since, self._refusal_count = None, 0
                continue
            is_idle = child is not None and child.process.returncode == 0 and name == "worker"
            if is_idle and not self._is_worker_requested():
                continue
            dead_since = self._dead_since.setdefault(name, now)
            if now - dead_since >= RESTART_SECONDS or name == "worker":
                if child is not None and child.process.returncode:
                    self._report_death(name, child)
                self._dead_since.pop(name, None)
                start()

    def _report_death(self, name: str, child: ChildProcess) -> None:
        if name == "worker" or ACTIVATION_FAILED not in child.read_log_tail(30):
            log.warning("device %s: %s died; restarting it", self.number, name)
            return
        self._refused_since = self._refused_since or time.monotonic()
        self._refusal_count += 1
        if self._refusal_count == REFUSALS_BEFORE_WARNING:
            log.warning("device %s: %s; retrying", self.number, REFUSED_MESSAGE)

    def close(self) -> None:
        """Stop the processes and release the folder."""
        for name in list(self._children):
            self._children.pop(name).stop()
        shutil.rmtree(self._socket_folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "FlowerDeviceSupervisor":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_worker_requested(self) -> bool:
        """Return whether a client app is waiting for the worker: it leaves a marker file."""
        return Path(f"{self._socket}.wanted").exists()

    def _start_worker(self) -> None:
        Path(f"{self._socket}.wanted").unlink(missing_ok=True)
        setup = DeviceWorkerSetup(
            self.number, str(self._folder), self._socket, self.limits, self._idle_seconds
        )
        command = [sys.executable, *self.worker_arguments, msgspec.json.encode(setup).decode()]
        self._children["worker"] = self._start_child("worker", command)

    def _start_node(self) -> None:
        command = [find_script("flower-supernode"), "--superlink", self._server]
        command += ["--host", "127.0.0.1", "--port", str(_find_free_port())]
        command += ["--node-config", f'device={self.number} socket="{self._socket}"']
        if self._ca is None or self._key is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self._ca.resolve())]
            command += ["--auth-supernode-private-key", str(self._key.resolve())]
        self._node_started_at = time.monotonic()
        self._children["supernode"] = self._start_child("supernode", command)

    def _start_child(self, name: str, command: list[str]) -> ChildProcess:
        if self._cpu is not None:
            command = ["taskset", "-c", str(self._cpu), *command]
        env = {**self._env, "PLIANT_DEVICE": str(self.number)}
        return ChildProcess(command, self._folder / "logs" / f"{name}.log", env)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
