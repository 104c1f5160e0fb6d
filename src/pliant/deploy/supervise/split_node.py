"""Supervise the process of a split device and restart it if it is killed.

The interface is that of `pliant.deploy.supervise.node`. This process does not import torch, to stay
small.
"""

import logging
import sys
import time
from pathlib import Path
from secrets import token_hex

import msgspec

from pliant.deploy.device.host import Limits
from pliant.deploy.grpc.device_main import SplitDeviceSetup
from pliant.deploy.security.probe import check_address
from pliant.deploy.supervise.child_process import ChildProcess, make_process_env, require_grpc
from pliant.deploy.supervise.log_forwarder import LogForwarder

log = logging.getLogger("pliant")


class SplitNodeSupervisor:
    """A device of a split run on this machine."""

    def __init__(
        self,
        number: int,
        server: str,
        folder: Path,
        limits: Limits,
        *,
        ca: Path | None = None,
        key: Path | None = None,
        cpu: int | None = None,
    ) -> None:
        require_grpc()
        check_address(server, ca, key)
        self.number, self._cpu = number, cpu
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = [None if path is None else str(path.resolve()) for path in (ca, key)]
        self._setup = SplitDeviceSetup(
            number, server, str(self._folder), limits, token_hex(8), *paths
        )
        self._log_path = self._folder / "logs" / "worker.log"
        self._log_forwarder = LogForwarder(self._log_path)
        self._child: ChildProcess | None = None
        self.refusal: str | None = None  # why the device ended, in one line

    @property
    def pids(self) -> dict[str, int]:
        """The process that is running now."""
        child = self._child
        return {"worker": child.process.pid} if child is not None and child.is_alive else {}

    def start(self) -> None:
        """Start the device's process."""
        command = [sys.executable, "-m", "pliant.deploy.grpc.device_main"]
        command += [msgspec.json.encode(self._setup).decode()]
        if self._cpu is not None:
            command = ["taskset", "-c", str(self._cpu), *command]
        env = {**make_process_env(self._folder), "PLIANT_DEVICE": str(self.number)}
        self._child = ChildProcess(command, self._log_path, env)

    def watch(self) -> None:
        """Restart the process when it dies; raise PermissionError once the server refuses it."""
        while self.refusal is None:
            self._restart_if_dead()
            time.sleep(0.2)
        raise PermissionError(self.refusal)

    def restart_dead(self) -> None:
        """Restart a killed process; log a refusal once and do not restart."""
        if self.refusal is None:
            self._restart_if_dead()
            if self.refusal is not None:
                log.warning("device %s ended: %s", self.number, self.refusal)

    def _restart_if_dead(self) -> None:
        child = self._child
        if child is None:
            return
        self._log_forwarder.forward()
        if child.is_alive:
            return
        if child.process.returncode >= 0:
            self.refusal = child.read_log_tail(1)
            return
        log.warning("device %s: its process died; restarting it", self.number)
        self.start()

    def close(self) -> None:
        """Stop the process."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __enter__(self) -> "SplitNodeSupervisor":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
