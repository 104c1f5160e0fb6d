"""The process of a split run's server, started again if it is killed.

It has the shape of Flower's (`pliant.deploy.server`), so that whoever starts a federation need not
know which kind it is.
"""

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pliant import atomic
from pliant.deploy.follow import LOCK, Follower
from pliant.deploy.keys import need_private
from pliant.deploy.processes import Child, environment, need_grpc, need_keys, need_port, reached
from pliant.deploy.service import Service
from pliant.deploy.split_echo import Echo
from pliant.deploy.squeeze import Plain
from pliant.engine.ledger import RoundRecord
from pliant.engine.lock import Lock

log = logging.getLogger("pliant")


class SplitServer:
    """A split run on real devices; the folder must hold its config already."""

    def __init__(
        self,
        folder: Path,
        service: Service,
        *,
        host: str = "127.0.0.1",
        port: int = 9092,
        keys: Path | None = None,
    ) -> None:
        need_grpc()
        need_keys(host, keys)
        if service.squeeze != Plain():
            raise ValueError("Expected --squeeze plain: a split method's own `payload` says it")
        if keys is not None:
            need_private(keys / "server.key")
        self.folder, self._service = folder.resolve(), service
        self.host, self.port = host, port
        self._keys = keys.resolve() if keys else None
        self._log = self.folder / "logs" / "server.log"
        self._echo: Echo | None = None
        self._lock: Lock | None = None
        self._child: Child | None = None
        self._follower = Follower(self.folder)
        if (self.folder / LOCK).exists():
            Lock(self.folder, LOCK).close()  # who serves the folder has its port, too
        need_port(host, port)

    @property
    def address(self) -> str:
        """Where devices find the server on this machine."""
        return reached(self.host, self.port)

    @property
    def pids(self) -> dict[str, int]:
        """Return the process that runs now."""
        child = self._child
        return {"run": child.process.pid} if child is not None and child.is_alive else {}

    def start(self) -> None:
        """Start the run's process."""
        self._lock = Lock(self.folder, LOCK)
        self._echo = Echo(self._log)
        atomic.write_bytes(self.folder / "service.json", msgspec.json.encode(self._service))
        self._begin()

    def _begin(self) -> None:
        keys = None if self._keys is None else str(self._keys)
        setup = {"folder": str(self.folder), "host": self.host, "port": self.port, "keys": keys}
        command = [sys.executable, "-m", "pliant.deploy.split_serve"]
        command += [msgspec.json.encode(setup).decode()]
        self._child = Child(command, self._log, environment(self.folder))

    def watch(self) -> Iterator[RoundRecord]:
        """Yield the records of rounds as they are written; go on after a kill."""
        shown = 0
        while True:
            is_alive = self._child is not None and self._child.is_alive
            found = self._follower.rounds()
            if self._echo is not None:
                self._echo.say()
            yield from found[shown:]
            shown = len(found)
            if self._follower.is_done() and not is_alive:
                return
            if not is_alive:
                self._mend()
            time.sleep(0.2)

    def _mend(self) -> None:
        child = self._child
        assert child is not None
        if child.process.returncode >= 0:  # it has not been killed: it cannot go on
            raise ChildProcessError(f"the server has ended: {child.last_words(1)}")
        log.warning("the run's process has died; starting it again")
        self._begin()

    def close(self) -> None:
        """End what was started."""
        if self._child is not None:
            self._child.end()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "SplitServer":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
