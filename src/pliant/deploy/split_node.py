"""The process of a device of split learning, started again if it is killed.

It has the shape of Flower's (`pliant.deploy.remote`). Nothing of torch is loaded here: who watches
a device has to be small.
"""

import logging
import sys
import time
from pathlib import Path
from secrets import token_hex

import msgspec

from pliant.deploy.door import need_address
from pliant.deploy.host import Limits
from pliant.deploy.processes import Child, environment, need_grpc
from pliant.deploy.split_echo import Echo
from pliant.deploy.split_worker import Setup

log = logging.getLogger("pliant")


class SplitRemoteDevice:
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
        need_grpc()
        need_address(server, ca, key)
        self.number, self._cpu = number, cpu
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = [None if path is None else str(path.resolve()) for path in (ca, key)]
        self._setup = Setup(number, server, str(self._folder), limits, token_hex(8), *paths)
        self._log = self._folder / "logs" / "worker.log"
        self._echo = Echo(self._log)
        self._child: Child | None = None
        self.refusal: str | None = None  # why it was not let in, in one line

    @property
    def pids(self) -> dict[str, int]:
        """Return the process that runs now."""
        child = self._child
        return {"worker": child.process.pid} if child is not None and child.is_alive else {}

    def start(self) -> None:
        """Start the device's process."""
        command = [sys.executable, "-m", "pliant.deploy.split_worker"]
        command += [msgspec.json.encode(self._setup).decode()]
        if self._cpu is not None:
            command = ["taskset", "-c", str(self._cpu), *command]
        env = {**environment(self._folder), "PLIANT_DEVICE": str(self.number)}
        self._child = Child(command, self._log, env)

    def watch(self) -> None:
        """Keep the process going, until it is refused."""
        while self.refusal is None:
            self._mend()
            time.sleep(0.2)
        raise PermissionError(self.refusal)

    def mend(self) -> None:
        """Start again what was killed; tell of what has been refused, which stays away."""
        if self.refusal is None:
            self._mend()
            if self.refusal is not None:
                log.warning("device %s has ended: %s", self.number, self.refusal)

    def _mend(self) -> None:
        child = self._child
        if child is None:
            return
        self._echo.say()
        if child.is_alive:
            return
        if child.process.returncode >= 0:
            self.refusal = child.last_words(1)
            return
        log.warning("device %s: its process has died; starting it again", self.number)
        self.start()

    def close(self) -> None:
        """End what was started."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def __enter__(self) -> "SplitRemoteDevice":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
