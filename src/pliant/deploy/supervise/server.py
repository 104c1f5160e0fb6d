"""Supervise the processes of a server: SuperLink, SuperExec and the run.

If the run's process dies, the run is submitted again and resumes from its checkpoint. If SuperLink
or SuperExec dies, it is restarted with its database.
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

from pliant.deploy.constants import FAILURE_FILE, LOCK_FILE, PID_FILE, SETTINGS_FILE
from pliant.deploy.security.certificates import check_private_file
from pliant.deploy.security.node_registry import register_devices, summarise_output
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    check_keys,
    check_port,
    find_script,
    format_local_address,
    make_process_env,
    require_flower,
)
from pliant.deploy.supervise.run_follower import RunFollower
from pliant.engine.ledger import RoundRecord
from pliant.storage import atomic
from pliant.storage.run_lock import RunLock

log = logging.getLogger("pliant")

CONNECTION_NAME = "pliant"  # of the connection in Flower's configuration
MAX_DEATHS = 10  # of the run's process in the same round, before giving up
START_SECONDS = 180.0  # in which a process must have started
APP_PROJECT = """\
[project]
name = "pliant-app"
version = "1.0.0"
description = "Rounds of pliant."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "pliant"

[tool.flwr.app.components]
serverapp = "pliant.deploy.flower.server_app:app"
clientapp = "pliant.deploy.flower.client_app:app"

[tool.flwr.app.config]
folder = ""
"""


class FlowerServerSupervisor:
    """Serve the run whose config is in a folder to real devices."""

    def __init__(
        self,
        folder: Path,
        settings: ServerSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 9092,
        keys: Path | None = None,
    ) -> None:
        require_flower()
        check_keys(host, keys)
        self.folder, self._settings = folder.resolve(), settings
        self.host, self.port = host, port
        self._keys = keys.resolve() if keys else None
        if self._keys is not None:
            for name in ("server.key", "superexec.secret"):
                check_private_file(self._keys / name)
        self._home = self.folder / "flower"
        self._env = make_process_env(self._home)
        self._children: dict[str, ChildProcess] = {}
        self._run_id: str | None = None
        self._lock: RunLock | None = None
        self._deaths: list[int] = []  # of the run's process, by the number of finished rounds
        self._follower = RunFollower(self.folder)
        if (self.folder / LOCK_FILE).exists():
            RunLock(self.folder, LOCK_FILE).release()  # fails if another server uses the folder
        check_port(host, port)

    @property
    def address(self) -> str:
        """Return the address of the server on this machine."""
        return format_local_address(self.host, self.port)

    @property
    def pids(self) -> dict[str, int]:
        """Return the running processes: SuperLink, SuperExec and the run."""
        pids = {name: c.process.pid for name, c in self._children.items() if c.is_alive}
        run_pid = self._read_run_pid()
        return pids | ({} if run_pid is None else {"run": run_pid})

    def start(self) -> None:
        """Start the processes and submit the run."""
        self._lock = RunLock(self.folder, LOCK_FILE)
        self._write_config()
        self._start_superlink()
        self._start_superexec()
        if self._keys is not None:
            register_devices(
                self._keys, self._home / "registered.json", CONNECTION_NAME, self._run_flwr
            )
        self._submit_run()

    def watch(self) -> Iterator[RoundRecord]:
        """Yield the record of each round as it is written, and restart dead processes."""
        count = 0
        while True:
            records = self._follower.read_rounds()
            yield from records[count:]
            count = len(records)
            if self._follower.is_done():
                return
            self._restart_dead()
            time.sleep(0.5)

    def close(self) -> None:
        """Stop the processes in reverse order and release the folder."""
        if self._lock is None:
            return
        for name in reversed(list(self._children)):
            self._children.pop(name).stop()
        pid = self._read_run_pid()
        if pid is not None and _is_alive(pid):  # it ends with its parent, but may take a second
            with suppress(ProcessLookupError):
                os.kill(pid, 15)
        self._lock.release()
        self._lock = None

    def __enter__(self) -> "FlowerServerSupervisor":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write_config(self) -> None:
        app = self._home / "app"
        app.mkdir(parents=True, exist_ok=True)
        (app / "pyproject.toml").write_text(APP_PROJECT)
        security = "insecure = true"
        if self._keys is not None:
            security = f"root-certificates = {json.dumps(str(self._keys / 'ca.crt'))}"
        config = f'[superlink]\ndefault = "{CONNECTION_NAME}"\n\n[superlink.{CONNECTION_NAME}]\n'
        config += f'address = "{self.address}"\n{security}\n'
        (self._home / "config.toml").write_text(config)
        (self.folder / PID_FILE).unlink(missing_ok=True)
        atomic.write_bytes(self.folder / SETTINGS_FILE, msgspec.json.encode(self._settings))

    def _start_superlink(self) -> None:
        check_port(self.host, self.port)
        command = [sys.executable, "-m", "pliant.deploy.flower.superlink"]
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
        self._children["superlink"] = self._start_child("superlink", command)
        self._wait_for_child("superlink")

    def _start_superexec(self) -> None:
        command = [find_script("flower-superexec"), "--runtime-api-address", self.address]
        command += ["--parent-pid", str(os.getpid())]
        if self._keys is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self._keys / "ca.crt")]
            command += ["--superexec-auth-secret-file", str(self._keys / "superexec.secret")]
        self._children["superexec"] = self._start_child("superexec", command)

    def _start_child(self, name: str, command: list[str]) -> ChildProcess:
        return ChildProcess(command, self._home / "logs" / f"{name}.log", self._env)

    def _wait_for_child(self, name: str) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            child = self._children[name]
            if not child.is_alive:
                raise ChildProcessError(f"{name} did not start: {child.read_log_tail()}")
            host = self.address.rpartition(":")[0].strip("[]")
            with suppress(OSError), socket.create_connection((host, self.port), 1.0):
                return
            time.sleep(0.1)
        raise ChildProcessError(
            f"{name} did not listen within {START_SECONDS:g} s; see {self._home / 'logs'}"
        )

    def _submit_run(self) -> None:
        for name in (PID_FILE, FAILURE_FILE):
            (self.folder / name).unlink(missing_ok=True)
        config = f"folder={json.dumps(str(self.folder))}"
        app = str(self._home / "app")
        result = self._run_flwr(
            "run", app, CONNECTION_NAME, "--run-config", config, "--format", "json"
        )
        run_id = re.search(r'"run-id": "?(\d+)', result.stdout)
        if result.returncode or run_id is None:
            raise ChildProcessError(f"Flower did not accept the run: {summarise_output(result)}")
        self._run_id = run_id.group(1)
        self._submitted_at = time.monotonic()

    def _run_flwr(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [find_script("flwr"), *arguments],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )

    def _restart_dead(self) -> None:
        """Restart dead processes and submit the run again if it died."""
        if not self._children["superlink"].is_alive:
            log.warning("SuperLink died; restarting it")
            self._start_superlink()
        if not self._children["superexec"].is_alive:
            log.warning("SuperExec died; restarting it")
            self._start_superexec()
        pid = self._read_run_pid()
        is_gone = pid is not None and not _is_alive(pid)
        is_overdue = pid is None and time.monotonic() - self._submitted_at > START_SECONDS
        if is_gone or is_overdue:
            if self._follower.is_done():
                return
            with suppress(FileNotFoundError):
                raise ChildProcessError((self.folder / FAILURE_FILE).read_text())
            self._deaths.append(len(self._follower.read_rounds()))
            if self._deaths[-MAX_DEATHS:] == [self._deaths[-1]] * MAX_DEATHS:
                path = self._home / "logs" / "superexec.log"
                raise ChildProcessError(f"the run died {MAX_DEATHS} times in one round; see {path}")
            log.warning("the run's process died; submitting the run again")
            if self._run_id is not None:
                self._run_flwr("stop", self._run_id, CONNECTION_NAME)
            self._submit_run()

    def _read_run_pid(self) -> int | None:
        try:
            return int((self.folder / PID_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie that SuperExec has not reaped
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self").exists()
