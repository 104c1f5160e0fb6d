"""Supervise the processes of a server: one for a split run, and three for Flower.

Flower's SuperLink and SuperExec run the rounds in a process of their own. If that dies, the run is
submitted again and resumes from its checkpoint.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from pliant.deploy.security.certificates import check_private_file
from pliant.deploy.security.node_registry import register_devices, summarise_output
from pliant.deploy.security.probe import ServerKind, check_loopback
from pliant.deploy.settings import FAILURE_FILE, LOCK_FILE, PID_FILE, SETTINGS_FILE, ServerSettings
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    check_port,
    format_address,
    format_local_address,
    make_command,
    make_process_env,
    read_log_tail,
    require_transport,
)
from pliant.deploy.supervise.supervisor import Process, Reaction, Service, Supervisor
from pliant.engine.ledger import Record, RoundRecord
from pliant.engine.run_store import CHECKPOINTS, EVENTS_FILE
from pliant.storage import atomic, formats
from pliant.storage.jsonl import JsonlHeader
from pliant.storage.run_lock import RunLock
from pliant.storage.tail import FileTail

POLL_SECONDS = 0.2
CONNECTION_NAME = "pliant"  # of the connection in Flower's configuration
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


class ServerSupervisor(Supervisor):
    """Serve the run whose config is in a folder to real devices."""

    def __init__(
        self,
        kind: ServerKind,
        folder: Path,
        settings: ServerSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 9092,
        keys: Path | None = None,
    ) -> None:
        require_transport(kind)
        check_loopback(host, has_keys=keys is not None)
        self._is_split = is_split = kind == "split"
        folder = folder.resolve()
        if keys is not None:
            keys = keys.resolve()
            for name in ("server.key",) if is_split else ("server.key", "superexec.secret"):
                check_private_file(keys / name)
        # before the port, which a server that holds the lock has taken as well
        if (folder / LOCK_FILE).exists():
            RunLock(folder, LOCK_FILE).release()
        check_port(host, port)
        self.address = format_local_address(host, port)
        self._settings, self._follower = settings, RunFollower(folder)
        make_backend = _SplitServer if is_split else _FlowerServer
        self._backend = make_backend(folder, host, port, keys)
        run = Service(
            "run",
            self._backend.title,
            self._start_run,
            self._backend.log_path,
            self._react_to_end_of_run,
            progress=lambda: len(self._follower.read_rounds()),
            is_log_forwarded=is_split,
        )
        super().__init__(folder, LOCK_FILE, [*self._backend.services, run])

    def watch(self) -> Iterator[RoundRecord]:
        """Yield the record of each round as it is written, and restart dead processes."""
        count = 0
        while True:
            is_ending = self._is_split and "run" in self.pids  # it still tells its devices
            self.forward_logs()
            records = self._follower.read_rounds()
            yield from records[count:]
            count = len(records)
            if self._follower.is_done() and not is_ending:
                return
            self.check()
            time.sleep(POLL_SECONDS)

    def _start_run(self) -> Process:
        atomic.write_bytes(self.folder / SETTINGS_FILE, msgspec.json.encode(self._settings))
        return self._backend.start_run()

    def _react_to_end_of_run(self, exit_code: int | None) -> Reaction:
        self._follower.read_rounds()
        if self._follower.is_done():
            return Reaction.WAIT
        failure = self._backend.find_failure(exit_code)
        if failure is not None:
            raise ChildProcessError(failure)
        return Reaction.RESTART


class _SplitServer:
    """The process of a split run."""

    title, services = "the server process", ()

    def __init__(self, folder: Path, host: str, port: int, keys: Path | None) -> None:
        self._folder, self.log_path = folder, folder / "logs" / "server.log"
        self._address, self._keys = format_address(host, port), None if keys is None else str(keys)

    def start_run(self) -> ChildProcess:
        setup = {"folder": str(self._folder), "address": self._address, "keys": self._keys}
        command = make_command("pliant.deploy.grpc.server_main", setup)
        return ChildProcess(command, self.log_path, make_process_env(self._folder))

    def find_failure(self, exit_code: int | None) -> str | None:
        if exit_code is not None and exit_code < 0:
            return None
        return f"the server ended: {read_log_tail(self.log_path, 1)}"  # and would end again


class _FlowerServer:
    """Flower's SuperLink and SuperExec, and the run that is submitted to them."""

    title = "the run's process"

    def __init__(self, folder: Path, host: str, port: int, keys: Path | None) -> None:
        self._folder, self._host, self._port, self._keys = folder, host, port, keys
        self._address = format_local_address(host, port)
        self._home = folder / "flower"
        self._env = make_process_env(self._home)
        logs = self._home / "logs"
        self._superlink_log, self.log_path = logs / "superlink.log", logs / "superexec.log"
        self.services = (
            Service("superlink", "SuperLink", self._start_superlink, self._superlink_log),
            Service("superexec", "SuperExec", self._start_superexec, self.log_path),
        )
        self._run_id: str | None = None

    def start_run(self) -> "_SubmittedRun":
        if self._run_id is not None:
            self._run_flwr("stop", self._run_id, CONNECTION_NAME)
        elif self._keys is not None:
            registry = self._home / "registered.json"
            register_devices(self._keys, registry, CONNECTION_NAME, self._run_flwr)
        for name in (PID_FILE, FAILURE_FILE):
            (self._folder / name).unlink(missing_ok=True)
        config = f"folder={json.dumps(str(self._folder))}"
        app = str(self._home / "app")
        result = self._run_flwr(
            "run", app, CONNECTION_NAME, "--run-config", config, "--format", "json"
        )
        run_id = re.search(r'"run-id": "?(\d+)', result.stdout)
        if result.returncode or run_id is None:
            raise ChildProcessError(f"Flower did not accept the run: {summarise_output(result)}")
        self._run_id = run_id.group(1)
        return _SubmittedRun(self._folder / PID_FILE, time.monotonic())

    def find_failure(self, exit_code: int | None) -> str | None:
        with suppress(FileNotFoundError):
            return (self._folder / FAILURE_FILE).read_text()
        return None

    def _start_superlink(self) -> ChildProcess:
        check_port(self._host, self._port)
        self._write_config()
        command = [sys.executable, "-m", "pliant.deploy.flower.superlink"]
        command += ["--host", self._host, "--port", str(self._port)]
        command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        command += ["--database", str(self._home / "state.db")]
        if self._keys is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-certfile", str(self._keys / "server.pem")]
            command += ["--ssl-keyfile", str(self._keys / "server.key")]
            command += ["--ssl-ca-certfile", str(self._keys / "ca.crt"), "--enable-supernode-auth"]
            command += ["--superexec-auth-secret-file", str(self._keys / "superexec.secret")]
        child = ChildProcess(command, self._superlink_log, self._env)
        try:
            self._wait_for_superlink(child)
        except BaseException:
            child.stop()
            raise
        return child

    def _write_config(self) -> None:
        app = self._home / "app"
        app.mkdir(parents=True, exist_ok=True)
        (app / "pyproject.toml").write_text(APP_PROJECT)
        security = "insecure = true"
        if self._keys is not None:
            security = f"root-certificates = {json.dumps(str(self._keys / 'ca.crt'))}"
        config = f'[superlink]\ndefault = "{CONNECTION_NAME}"\n\n[superlink.{CONNECTION_NAME}]\n'
        config += f'address = "{self._address}"\n{security}\n'
        (self._home / "config.toml").write_text(config)

    def _wait_for_superlink(self, child: ChildProcess) -> None:
        path = self._superlink_log
        host = self._address.rpartition(":")[0].strip("[]")
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if not child.is_alive:
                raise ChildProcessError(f"superlink did not start: {read_log_tail(path, 5)}")
            with suppress(OSError), socket.create_connection((host, self._port), 1.0):
                return
            time.sleep(0.1)
        raise ChildProcessError(
            f"superlink did not listen within {START_SECONDS:g} s; see {path.parent}"
        )

    def _start_superexec(self) -> ChildProcess:
        command = ["flower-superexec", "--runtime-api-address", self._address]
        command += ["--parent-pid", str(os.getpid())]
        if self._keys is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self._keys / "ca.crt")]
            command += ["--superexec-auth-secret-file", str(self._keys / "superexec.secret")]
        return ChildProcess(command, self.log_path, self._env)

    def _run_flwr(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["flwr", *arguments],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )


@dataclass(frozen=True)
class _SubmittedRun:
    """A run that SuperExec executes, in a process that writes its id to a file."""

    pid_path: Path
    submitted_at: float
    exit_code = None  # unknown, as it is not our child

    @property
    def pid(self) -> int | None:
        with suppress(FileNotFoundError, ValueError):
            return int(self.pid_path.read_text())
        return None

    @property
    def is_alive(self) -> bool:
        pid = self.pid
        if pid is None:
            return time.monotonic() - self.submitted_at < START_SECONDS
        try:  # a zombie is one that SuperExec has not reaped
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def stop(self) -> None:
        if self.is_alive and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class RunFollower:
    """Read the rounds of a run as they are written."""

    def __init__(self, folder: Path) -> None:
        self._tail, self._checkpoints = FileTail(folder / EVENTS_FILE), folder / CHECKPOINTS
        self._decoder = msgspec.json.Decoder(Record | JsonlHeader)
        self._records: list[RoundRecord] = []

    def read_rounds(self) -> list[RoundRecord]:
        """Return the records of all rounds so far."""
        while True:
            is_cut, lines = self._tail.read_new_lines()
            if is_cut:  # a resumed run has dropped records and written others
                self._records = []
            if not lines:
                return self._records
            for record in map(self._decoder.decode, lines.splitlines()):
                if isinstance(record, JsonlHeader):
                    formats.RECORDS.check(record.format, self._tail.path)
                elif isinstance(record, RoundRecord):
                    self._records.append(record)

    def is_done(self) -> bool:
        """Return whether the last round that was read has ended the run and is in a checkpoint."""
        rounds = self._records
        if not rounds or rounds[-1].digest is None:
            return False
        return (self._checkpoints / f"{rounds[-1].round + 1:08d}.ckpt").exists()
