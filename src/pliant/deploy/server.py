"""The server's processes: SuperLink, SuperExec and the run, started, watched and ended by us.

If the run's process dies, the run is handed in again and goes on from its checkpoint. If SuperLink
or SuperExec die, they are started again with their database.
"""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from pliant import atomic
from pliant.deploy.follow import FAILURE, LOCK, Follower
from pliant.deploy.keys import need_private
from pliant.deploy.processes import (
    Child,
    environment,
    need_flower,
    need_keys,
    need_port,
    reached,
    script,
)
from pliant.deploy.registry import register, said
from pliant.deploy.service import Service
from pliant.engine.ledger import RoundRecord
from pliant.engine.lock import Lock

log = logging.getLogger("pliant")

NAME = "pliant"  # of the connection in Flower's configuration
DEATHS = 10  # of the run's process in the same round, before it is given up
START = 180.0  # seconds in which a process must be there
APP = """\
[project]
name = "pliant-app"
version = "1.0.0"
description = "Rounds of pliant."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "pliant"

[tool.flwr.app.components]
serverapp = "pliant.deploy.server_app:app"
clientapp = "pliant.deploy.client_app:app"

[tool.flwr.app.config]
folder = ""
"""


class Server:
    """A run of an experiment on real devices; the folder must hold its config already."""

    def __init__(
        self,
        folder: Path,
        service: Service,
        *,
        host: str = "127.0.0.1",
        port: int = 9092,
        keys: Path | None = None,
    ) -> None:
        need_flower()
        need_keys(host, keys)
        self.folder, self._service = folder.resolve(), service
        self.host, self.port = host, port
        self._keys = keys.resolve() if keys else None
        if self._keys is not None:
            for name in ("server.key", "superexec.secret"):
                need_private(self._keys / name)
        self._home = self.folder / "flower"
        self._env = environment(self._home)
        self._children: dict[str, Child] = {}
        self._run: str | None = None
        self._lock: Lock | None = None
        self._deaths: list[int] = []  # of the run's process: rounds that were over
        self._follower = Follower(self.folder)
        if (self.folder / LOCK).exists():
            Lock(self.folder, LOCK).close()  # who serves the folder has its port, too
        need_port(host, port)

    @property
    def address(self) -> str:
        """Where devices and we ourselves find the server on this machine."""
        return reached(self.host, self.port)

    @property
    def pids(self) -> dict[str, int]:
        """Return the processes that run now: SuperLink, SuperExec and the run's own."""
        found = {name: c.process.pid for name, c in self._children.items() if c.is_alive}
        pid = self._pid()
        return found | ({} if pid is None else {"run": pid})

    def start(self) -> None:
        """Start everything and hand the run in."""
        self._lock = Lock(self.folder, LOCK)
        self._prepare()
        self._link()
        self._exec()
        if self._keys is not None:
            register(self._keys, self._home / "registered.json", NAME, self._flwr)
        self._hand_in()

    def watch(self) -> Iterator[RoundRecord]:
        """Yield the records of rounds as they are written, and keep the processes going."""
        shown = 0
        while True:
            found = self._follower.rounds()
            yield from found[shown:]
            shown = len(found)
            if self._follower.is_done():
                return
            self._mend()
            time.sleep(0.5)

    def close(self) -> None:
        """End what was started, the last first."""
        if self._lock is None:
            return
        for name in reversed(list(self._children)):
            self._children.pop(name).end()
        pid = self._pid()
        if pid is not None and _is_alive(pid):  # it watches its parent; it may take a second
            with suppress(ProcessLookupError):
                os.kill(pid, 15)
        self._lock.close()
        self._lock = None

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prepare(self) -> None:
        app = self._home / "app"
        app.mkdir(parents=True, exist_ok=True)
        (app / "pyproject.toml").write_text(APP)
        secure = (
            "insecure = true"
            if self._keys is None
            else f"root-certificates = {json.dumps(str(self._keys / 'ca.crt'))}"
        )
        config = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
        config += f'address = "{self.address}"\n{secure}\n'
        (self._home / "config.toml").write_text(config)
        (self.folder / "server.pid").unlink(missing_ok=True)
        atomic.write_bytes(self.folder / "service.json", msgspec.json.encode(self._service))

    def _link(self) -> None:
        need_port(self.host, self.port)
        command = [sys.executable, "-m", "pliant.deploy.superlink"]
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        command += ["--database", str(self._home / "state.db")]
        if self._keys is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-certfile", str(self._keys / "server.pem")]
            command += ["--ssl-keyfile", str(self._keys / "server.key")]
            command += ["--ssl-ca-certfile", str(self._keys / "ca.crt"), "--enable-supernode-auth"]
            command += ["--superexec-auth-secret-file", str(self._keys / "superexec.secret")]
        self._children["superlink"] = self._child("superlink", command)
        self._await("superlink")

    def _exec(self) -> None:
        command = [script("flower-superexec"), "--runtime-api-address", self.address]
        command += ["--parent-pid", str(os.getpid())]
        if self._keys is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self._keys / "ca.crt")]
            command += ["--superexec-auth-secret-file", str(self._keys / "superexec.secret")]
        self._children["superexec"] = self._child("superexec", command)

    def _child(self, name: str, command: list[str]) -> Child:
        return Child(command, self._home / "logs" / f"{name}.log", self._env)

    def _await(self, name: str) -> None:
        end = time.monotonic() + START
        while time.monotonic() < end:
            child = self._children[name]
            if not child.is_alive:
                raise ChildProcessError(f"{name} did not start: {child.last_words()}")
            host = self.address.rpartition(":")[0].strip("[]")
            with suppress(OSError), socket.create_connection((host, self.port), 1.0):
                return
            time.sleep(0.1)
        raise ChildProcessError(
            f"{name} was not there after {START:g} s; see {self._home / 'logs'}"
        )

    def _hand_in(self) -> None:
        for name in ("server.pid", FAILURE):
            (self.folder / name).unlink(missing_ok=True)
        config = f"folder={json.dumps(str(self.folder))}"
        app = str(self._home / "app")
        done = self._flwr("run", app, NAME, "--run-config", config, "--format", "json")
        found = re.search(r'"run-id": "?(\d+)', done.stdout)
        if done.returncode or found is None:
            raise ChildProcessError(f"the run was not taken: {said(done)}")
        self._run = found.group(1)
        self._handed_in = time.monotonic()

    def _flwr(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [script("flwr"), *arguments],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=START,
            check=False,
        )

    def _mend(self) -> None:
        """Start again what has died."""
        if not self._children["superlink"].is_alive:
            log.warning("SuperLink has died; starting it again")
            self._link()
        if not self._children["superexec"].is_alive:
            log.warning("SuperExec has died; starting it again")
            self._exec()
        pid = self._pid()
        is_gone = pid is not None and not _is_alive(pid)
        is_overdue = pid is None and time.monotonic() - self._handed_in > START
        if is_gone or is_overdue:
            if self._follower.is_done():
                return
            with suppress(FileNotFoundError):
                raise ChildProcessError((self.folder / FAILURE).read_text())
            self._deaths.append(len(self._follower.rounds()))
            if self._deaths[-DEATHS:] == [self._deaths[-1]] * DEATHS:
                where = self._home / "logs" / "superexec.log"
                raise ChildProcessError(
                    f"the run has died {DEATHS} times in one round; see {where}"
                )
            log.warning("the run's process has died; handing the run in again")
            if self._run is not None:
                self._flwr("stop", self._run, NAME)
            self._hand_in()

    def _pid(self) -> int | None:
        try:
            return int((self.folder / "server.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"  # a child that superexec has not reaped
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self").exists()
