"""Supervise the server process of a split run and restart it if it is killed.

The interface is that of `pliant.deploy.supervise.server`, so callers need not know which one runs.
"""

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pliant.compression import Uncompressed
from pliant.deploy.constants import LOCK_FILE, SETTINGS_FILE
from pliant.deploy.security.certificates import check_private_file
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    check_keys,
    check_port,
    format_local_address,
    make_process_env,
    require_grpc,
)
from pliant.deploy.supervise.log_forwarder import LogForwarder
from pliant.deploy.supervise.run_follower import RunFollower
from pliant.engine.ledger import RoundRecord
from pliant.storage import atomic
from pliant.storage.run_lock import RunLock

log = logging.getLogger("pliant")


class SplitServerSupervisor:
    """A split run on real devices; the folder must already hold its config."""

    def __init__(
        self,
        folder: Path,
        settings: ServerSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 9092,
        keys: Path | None = None,
    ) -> None:
        require_grpc()
        check_keys(host, keys)
        if settings.compression != Uncompressed():
            raise ValueError("Expected --compress plain: split methods compress by `payload`")
        if keys is not None:
            check_private_file(keys / "server.key")
        self.folder, self._settings = folder.resolve(), settings
        self.host, self.port = host, port
        self._keys = keys.resolve() if keys else None
        self._log_path = self.folder / "logs" / "server.log"
        self._log_forwarder: LogForwarder | None = None
        self._lock: RunLock | None = None
        self._child: ChildProcess | None = None
        self._follower = RunFollower(self.folder)
        # before the port, which a server that holds the lock has taken as well
        if (self.folder / LOCK_FILE).exists():
            RunLock(self.folder, LOCK_FILE).release()
        check_port(host, port)

    @property
    def address(self) -> str:
        """The address of the server for devices on this machine."""
        return format_local_address(self.host, self.port)

    @property
    def pids(self) -> dict[str, int]:
        """The process that is running now."""
        child = self._child
        return {"run": child.process.pid} if child is not None and child.is_alive else {}

    def start(self) -> None:
        """Start the server process."""
        self._lock = RunLock(self.folder, LOCK_FILE)
        self._log_forwarder = LogForwarder(self._log_path)
        atomic.write_bytes(self.folder / SETTINGS_FILE, msgspec.json.encode(self._settings))
        self._start_process()

    def _start_process(self) -> None:
        keys = None if self._keys is None else str(self._keys)
        setup = {"folder": str(self.folder), "host": self.host, "port": self.port, "keys": keys}
        command = [sys.executable, "-m", "pliant.deploy.grpc.server_main"]
        command += [msgspec.json.encode(setup).decode()]
        self._child = ChildProcess(command, self._log_path, make_process_env(self.folder))

    def watch(self) -> Iterator[RoundRecord]:
        """Yield the records of rounds as they are written; restart a killed process."""
        count = 0
        while True:
            is_alive = self._child is not None and self._child.is_alive
            records = self._follower.read_rounds()
            if self._log_forwarder is not None:
                self._log_forwarder.forward()
            yield from records[count:]
            count = len(records)
            if self._follower.is_done() and not is_alive:
                return
            if not is_alive:
                self._restart_process()
            time.sleep(0.2)

    def _restart_process(self) -> None:
        child = self._child
        assert child is not None
        if child.process.returncode >= 0:  # it was not killed, so a restart would fail again
            raise ChildProcessError(f"the server ended: {child.read_log_tail(1)}")
        log.warning("the server process died; restarting it")
        self._start_process()

    def close(self) -> None:
        """Stop the process and release the lock."""
        if self._child is not None:
            self._child.stop()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "SplitServerSupervisor":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
