"""Supervise the processes of a server: one over gRPC, and three over Flower.

Flower's SuperLink and SuperExec run the rounds in a process of their own. If that dies, the run is
submitted again and resumes from its checkpoint.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import msgspec
import psutil

from pliant.deploy.security.certificates import check_server_keys
from pliant.deploy.security.probe import check_loopback
from pliant.deploy.settings import (
    BYTE_LIMIT_FILE,
    CONTROL_SECRET_VARIABLE,
    FAILURE_FILE,
    LOCK_FILE,
    PID_FILE,
    SETTINGS_FILE,
    ServerSettings,
)
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
from pliant.deploy.versions import ServerKind
from pliant.engine.ledger import Record, RoundRecord
from pliant.engine.run_store import CHECKPOINTS, EVENTS_FILE
from pliant.storage import atomic, formats
from pliant.storage.jsonl import JsonlHeader
from pliant.storage.run_lock import RunLock
from pliant.storage.tail import FileTail

POLL_SECONDS = 0.2
START_SECONDS = 180.0  # in which a process must have started
GRPC_SERVERS = {  # the modules of their processes
    "split": "pliant.deploy.grpc.server_main",
    "federated_grpc": "pliant.deploy.grpc.federated_main",
}
CLOCK_TOLERANCE = 1.0  # seconds, between the times of a file and of a process


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
        self._is_grpc = is_grpc = kind != "federated"
        folder = folder.resolve()
        if keys is not None:
            keys = keys.resolve()
            check_server_keys(keys)
        # before the port, which a server that holds the lock has taken as well
        if (folder / LOCK_FILE).exists():
            RunLock(folder, LOCK_FILE).release()
        check_port(host, port)
        self.address = format_local_address(host, port)
        self._settings, self._follower = settings, RunFollower(folder)
        self._backend: _GrpcBackend | _FlowerServer
        if is_grpc:
            self._backend = _GrpcBackend(GRPC_SERVERS[kind], folder, host, port, keys)
        else:
            self._backend = _FlowerServer(folder, host, port, keys)
        run = Service(
            "run",
            self._backend.title,
            self._start_run,
            self._backend.log_path,
            self._react_to_end_of_run,
            progress=lambda: len(self._follower.read_rounds()),
            is_log_forwarded=is_grpc,
        )
        super().__init__(folder, LOCK_FILE, [*self._backend.services, run])

    def watch(self) -> Iterator[RoundRecord]:
        """Yield the record of each round as it is written, and restart dead processes."""
        count = 0
        while True:
            is_ending = self._is_grpc and "run" in self.pids  # it still tells its devices
            self.forward_logs()
            records = self._follower.read_rounds()
            yield from records[count:]
            count = len(records)
            if self._follower.is_done() and not is_ending:
                self._on_close.callback(self._backend.remove_state)
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


class _GrpcBackend:
    """The process of a run over gRPC."""

    title, services = "the server process", ()

    def __init__(self, module: str, folder: Path, host: str, port: int, keys: Path | None) -> None:
        self._module, self._folder = module, folder
        self.log_path = folder / "logs" / "server.log"
        self._address, self._keys = format_address(host, port), None if keys is None else str(keys)

    def start_run(self) -> ChildProcess:
        setup = {"folder": str(self._folder), "address": self._address, "keys": self._keys}
        command = make_command(self._module, setup)
        return ChildProcess(command, self.log_path, make_process_env(self._folder))

    def remove_state(self) -> None:
        """Keep the run, as it has all its state in its checkpoints."""

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
        self._ca = None if keys is None else keys / "ca.crt"
        self._home = folder / "flower"
        self._env = make_process_env(self._home)
        logs = self._home / "logs"
        self._superlink_log, self.log_path = logs / "superlink.log", logs / "superexec.log"
        self.services = (
            Service("superlink", "SuperLink", self._start_superlink, self._superlink_log),
            Service("superexec", "SuperExec", self._start_superexec, self.log_path),
        )
        self._run_id: int | None = None
        self._has_started = False
        self._control_secret, self._superexec_secret = token_hex(32), token_hex(32)

    def start_run(self) -> "_SubmittedRun":
        for name in (PID_FILE, FAILURE_FILE):
            (self._folder / name).unlink(missing_ok=True)
        setup = {
            "address": self._address,
            "ca": None if self._ca is None else str(self._ca),
            "folder": str(self._folder),
            "last_run": self._run_id,
        }
        result = subprocess.run(
            make_command("pliant.deploy.flower.control", setup),
            env={**self._env, CONTROL_SECRET_VARIABLE: self._control_secret},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        if result.returncode:
            output = " ".join((result.stdout + result.stderr).split())[-500:]
            raise ChildProcessError(f"Flower did not accept the run: {output}")
        self._run_id = int(result.stdout)
        return _SubmittedRun(self._folder / PID_FILE, time.monotonic())

    def find_failure(self, exit_code: int | None) -> str | None:
        with suppress(FileNotFoundError):
            return (self._folder / FAILURE_FILE).read_text()
        return None

    def _start_superlink(self) -> ChildProcess:
        check_port(self._host, self._port)
        self._home.mkdir(parents=True, exist_ok=True)
        if not self._has_started:  # only a restarted SuperLink needs what it has stored
            self.remove_state()
            self._has_started = True
        command = [sys.executable, "-m", "pliant.deploy.flower.superlink"]
        command += [str(self._folder / BYTE_LIMIT_FILE), str(self._keys or "")]
        command += ["--host", self._host, "--port", str(self._port)]
        command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        command += ["--database", str(self._home / "state.db"), *self._pass_superexec_secret()]
        if self._keys is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-certfile", str(self._keys / "server.pem")]
            command += ["--ssl-keyfile", str(self._keys / "server.key")]
            command += ["--ssl-ca-certfile", str(self._ca), "--enable-supernode-auth"]
        env = {**self._env, CONTROL_SECRET_VARIABLE: self._control_secret}
        child = ChildProcess(command, self._superlink_log, env)
        try:
            self._wait_for_superlink(child)
        except BaseException:
            child.stop()
            raise
        return child

    def remove_state(self) -> None:
        """Delete what SuperLink has stored: messages, nodes and tokens of tasks."""
        for path in self._home.glob("state.db*"):
            path.unlink(missing_ok=True)

    def _pass_superexec_secret(self) -> list[str]:
        path = self._home / "superexec.secret"
        path.unlink(missing_ok=True)
        path.touch(0o600)
        path.write_text(self._superexec_secret)
        return ["--superexec-auth-secret-file", str(path)]

    def _wait_for_superlink(self, child: ChildProcess) -> None:
        path = self._superlink_log
        host = self._address.rpartition(":")[0].strip("[]")
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if not child.is_alive:
                reason = child.read_last_line()
                raise ChildProcessError(f"SuperLink did not start: {reason} (see {path})")
            with suppress(OSError), socket.create_connection((host, self._port), 1.0):
                return
            time.sleep(0.1)
        raise ChildProcessError(
            f"SuperLink did not listen within {START_SECONDS:g} s; see {path.parent}"
        )

    def _start_superexec(self) -> ChildProcess:
        command = ["flower-superexec", "--runtime-api-address", self._address]
        command += ["--parent-pid", str(os.getpid()), *self._pass_superexec_secret()]
        command += ["--insecure"] if self._ca is None else ["--root-certificates", str(self._ca)]
        return ChildProcess(command, self.log_path, self._env)


@dataclass(frozen=True)
class _SubmittedRun:
    """A run that SuperExec executes, in a process that writes its id to a file."""

    pid_path: Path
    submitted_at: float
    exit_code = None  # unknown, as it is not our child

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def is_alive(self) -> bool:
        if not self.pid_path.exists():
            return time.monotonic() - self.submitted_at < START_SECONDS
        process = self._process
        try:  # a zombie is one that SuperExec has not reaped
            return process is not None and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def stop(self) -> None:
        process = self._process
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.terminate()

    @property
    def _process(self) -> psutil.Process | None:
        """Return the process that wrote the file, and none that got its number later."""
        try:
            process = psutil.Process(int(self.pid_path.read_text()))
            is_writer = process.create_time() <= self.pid_path.stat().st_mtime + CLOCK_TOLERANCE
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return None
        return process if is_writer else None


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
