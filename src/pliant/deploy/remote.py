"""A device's processes: Flower's SuperNode and the worker that trains, kept going."""

import logging
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from pliant.deploy.door import need_address
from pliant.deploy.host import Limits
from pliant.deploy.processes import Child, environment, need_flower, script
from pliant.deploy.worker import Setup
from pliant.engine.lock import Lock

log = logging.getLogger("pliant")

IDLE = 120.0  # seconds without an order after which the worker gives its memory back
PATIENCE = 180.0  # seconds in which a server must have let a device in
TELLING = 3  # times that a device is turned away before its user hears of it
SETTLED = 30.0  # seconds after which a node that still runs was let in
TURNED_AWAY = "Failed to activate SuperNode"  # in the node's log
REFUSED = "expected a registered key that no other process has, but the server does not let it in"
AGAIN = 5.0  # seconds before a node is started again, which Flower may refuse for a minute


class RemoteDevice:
    """A device of a federation on this machine."""

    program = ("-m", "pliant.deploy.worker")  # what the worker runs

    def __init__(
        self,
        number: int,
        server: str,
        folder: Path,
        limits: Limits,
        *,
        ca: Path | None = None,
        key: Path | None = None,
        idle_seconds: float = IDLE,
        cpu: int | None = None,
    ) -> None:
        need_flower()
        need_address(server, ca, key)
        self.number, self._server = number, server
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ca, self._key = ca, key
        self.limits, self._idle, self._cpu = limits, idle_seconds, cpu
        self._env = environment(self._folder / "flower")
        # a socket's path is short, wherever the folder is
        self._private = Path(tempfile.mkdtemp(prefix="pliant-"))
        self._socket = str(self._private / "worker")
        self._children: dict[str, Child] = {}
        self._since: dict[str, float] = {}
        self._begun = 0.0  # when the node was started
        self._refused: float | None = None  # since when the server does not let it in
        self._refusals = 0
        self._lock: Lock | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Return the processes that run now."""
        return {name: child.process.pid for name, child in self._children.items() if child.is_alive}

    def start(self) -> None:
        """Start worker and node."""
        self._lock = Lock(self._folder, "device.lock")
        self._work()
        self._node()

    def watch(self) -> None:
        """Keep the processes going, for ever."""
        while True:
            self.mend()
            if self._refused is not None and time.monotonic() - self._refused > PATIENCE:
                raise PermissionError(f"device {self.number}: {REFUSED} for {PATIENCE:g} s")
            time.sleep(0.2)

    def mend(self) -> None:
        """Start again what has died, after a little while."""
        for name, start in (("worker", self._work), ("supernode", self._node)):
            child = self._children.get(name)
            if child is not None and child.is_alive:
                self._since.pop(name, None)
                if name == "supernode" and time.monotonic() - self._begun > SETTLED:
                    self._refused, self._refusals = None, 0
                continue
            is_idle = child is not None and child.process.returncode == 0 and name == "worker"
            if is_idle and not self._is_wanted():
                continue
            began = self._since.setdefault(name, time.monotonic())
            if time.monotonic() - began >= AGAIN or name == "worker":
                if child is not None and child.process.returncode:
                    self._tell(name, child)
                self._since.pop(name, None)
                start()

    def _tell(self, name: str, child: Child) -> None:
        if name == "worker" or TURNED_AWAY not in child.last_words(30):
            log.warning("device %s: %s has died; starting it again", self.number, name)
            return
        self._refused = self._refused or time.monotonic()
        self._refusals += 1
        if self._refusals == TELLING:  # a server that has just come may still learn the keys
            log.warning("device %s: %s; trying again", self.number, REFUSED)

    def close(self) -> None:
        """End what was started."""
        for name in list(self._children):
            self._children.pop(name).end()
        shutil.rmtree(self._private, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "RemoteDevice":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_wanted(self) -> bool:
        """Tell whether a client app waits for the worker: it leaves a note."""
        return Path(f"{self._socket}.wanted").exists()

    def _work(self) -> None:
        Path(f"{self._socket}.wanted").unlink(missing_ok=True)
        setup = Setup(self.number, str(self._folder), self._socket, self.limits, self._idle)
        command = [sys.executable, *self.program, msgspec.json.encode(setup).decode()]
        self._children["worker"] = self._child("worker", command)

    def _node(self) -> None:
        command = [script("flower-supernode"), "--superlink", self._server]
        command += ["--host", "127.0.0.1", "--port", str(_free_port())]
        command += ["--node-config", f'device={self.number} socket="{self._socket}"']
        if self._ca is None or self._key is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self._ca.resolve())]
            command += ["--auth-supernode-private-key", str(self._key.resolve())]
        self._begun = time.monotonic()
        self._children["supernode"] = self._child("supernode", command)

    def _child(self, name: str, command: list[str]) -> Child:
        if self._cpu is not None:
            command = ["taskset", "-c", str(self._cpu), *command]
        env = {**self._env, "PLIANT_DEVICE": str(self.number)}
        return Child(command, self._folder / "logs" / f"{name}.log", env)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
