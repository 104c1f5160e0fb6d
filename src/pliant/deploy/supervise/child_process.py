"""Start child processes that end with their parent, and stop them on Ctrl-C."""

import ctypes
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

import msgspec

from pliant.deploy.settings import PORTS
from pliant.deploy.versions import ServerKind
from pliant.extras import MissingExtra
from pliant.storage import atomic
from pliant.storage.tail import FileTail

log = logging.getLogger("pliant")

CHILD_ENV = {
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_LOG_BYTES = 10_000_000  # and as many of the log before it
TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_LEVELS = {logging.getLevelName(level): level for level in (logging.INFO, logging.WARNING)}


def make_process_env(home: Path) -> dict[str, str]:
    """Return the environment of child processes: no telemetry, no installs, our interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **CHILD_ENV, "FLWR_HOME": str(home), "PATH": path}


class ChildProcess:
    """A child process whose output goes to a log."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with open(log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            self._log_start = file.tell()  # after the lines of earlier processes
            self._process = subprocess.Popen(
                list(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(env),
                umask=0o077,  # what it writes may hold activations, labels and tokens
                start_new_session=True,  # Ctrl-C is for the parent, which stops its children
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self.pid = self._process.pid

    def read_last_line(self) -> str:
        """Return the last line that this process wrote, or where its output would be."""
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return written[-1] if written else f"it wrote nothing to {self._log}"

    @property
    def exit_code(self) -> int | None:
        if self._process.returncode is None and self._has_ended():
            # before it is reaped, as until then no other group can get its number
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        return self._process.returncode

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def stop(self) -> None:
        """Stop the process and its group, and wait for its end."""
        if not self.is_alive:
            return
        self._signal_group(signal.SIGTERM)
        end = time.monotonic() + TERMINATE_SECONDS
        while self.is_alive and time.monotonic() < end:
            time.sleep(0.02)
        if self.is_alive:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def _has_ended(self) -> bool:
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:  # another thread has reaped it
            return True

    def _signal_group(self, signum: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)  # it leads a group, by `start_new_session`


class LogForwarder:
    """Forward the log of a child process to this one's; skip lines of other libraries."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)
        self._tail.offset = path.stat().st_size if path.exists() else 0

    def forward(self) -> None:
        """Log the lines that were written since the last call, or since the beginning."""
        _, lines = self._tail.read_new_lines()
        for line in lines.splitlines():
            level, _, message = line.decode(errors="replace").rstrip().partition(" pliant: ")
            if level in _LEVELS and message:
                log.log(_LEVELS[level], "%s", message)


def rotate_log(path: Path) -> None:
    """Keep the newest part of a log that has grown too large, in a file beside it.

    A process that appends to the log goes on at its new end.
    """
    if not path.exists() or path.stat().st_size <= MAX_LOG_BYTES:
        return
    with path.open("rb") as file:
        file.seek(-MAX_LOG_BYTES, os.SEEK_END)
        atomic.write_bytes(path.with_suffix(".log.1"), file.read(), is_private=True)
    os.truncate(path, 0)


def read_log_tail(path: Path, count: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def make_command(module: str, setup: object) -> list[str]:
    """Return the command that runs a module with a setup as its only argument."""
    return [sys.executable, "-m", module, msgspec.json.encode(setup).decode()]


class Startable(Protocol):
    """Something that is started, and must be closed even if starting fails."""

    def start(self) -> None: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Startable)


@contextmanager
def run_supervisor(supervisor: S) -> Iterator[S]:
    """Start a supervisor and close it at the end, or on Ctrl-C or SIGTERM.

    Closing takes seconds. Further signals are ignored, as they would leave processes behind.
    """
    with interrupt_on_signal():
        try:
            supervisor.start()
            yield supervisor
        finally:
            _ignore_signals()
            supervisor.close()


@contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first Ctrl-C or SIGTERM, and ignore all later ones."""
    handlers = {signum: signal.getsignal(signum) for signum in END_SIGNALS}
    for signum, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # as a shell sets it for background jobs
            signal.signal(signum, _interrupt)
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _ignore_signals() -> None:
    for signum in END_SIGNALS:  # with a function, as children would inherit SIG_IGN
        signal.signal(signum, lambda signum, frame: None)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise KeyboardInterrupt


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    if _LIBC is not None:  # loaded before the fork, after which little is safe
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def require_transport(kind: ServerKind) -> None:
    """Raise `MissingExtra` if the library of a kind of server is missing, without importing it."""
    name = "flwr" if kind == "federated" else "grpc"
    if find_spec(name) is None:
        raise MissingExtra(f"{name} is not installed: run `pip install 'pliant[deploy]'`")


def check_port(host: str, port: int) -> None:
    """Raise a one-line error if it is impossible to listen on a port."""
    if port not in PORTS:
        raise ValueError(f"Expected --port from 1 to 65535, got {port}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(
            f"Expected --host to be an address of this machine, got {host!r}"
        ) from None
    problems = [_find_bind_error(family, address) for family, _, _, _, address in addresses]
    if errno.EADDRINUSE in problems:
        raise ValueError(
            f"Cannot listen on {host}:{port}: the port is taken; choose another --port"
        )
    if all(problem == errno.EADDRNOTAVAIL for problem in problems):
        raise ValueError(f"Cannot listen on {host}: it is not an address of this machine")
    if None not in problems:
        raise ValueError(f"Cannot listen on {host}:{port}: {os.strerror(problems[0] or 0)}")


def _find_bind_error(family: int, address: object) -> int | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)  # type: ignore[arg-type] # as getaddrinfo gave it
    except OSError as error:
        return error.errno
    return None


def format_local_address(host: str, port: int) -> str:
    """Return the address at which this machine reaches a server that listens on a host.

    >>> from pliant.deploy.supervise.child_process import format_local_address
    >>> [format_local_address(host, 9092) for host in ("0.0.0.0", "::1", "10.0.0.7")]
    ['127.0.0.1:9092', '[::1]:9092', '10.0.0.7:9092']
    """
    local = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}
    return format_address(local.get(host, host), port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
