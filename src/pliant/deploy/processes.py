"""Child processes that end with their parent, and nothing else that ends with them."""

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Protocol

from pliant.extras import MissingExtra

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; one by default
}
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PORTS = range(1, 65536)
ENDS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 5.0  # seconds between asking a process to end and making it


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: no telemetry, no installs, our interpreter."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", "")])
    threads = {"OMP_NUM_THREADS": "1"}
    return {**os.environ, **threads, **QUIET, "FLWR_HOME": str(home), "PATH": path}


class Child:
    """A process that we started, and its log."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                list(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,  # Ctrl-C is for us, who end them in order
                preexec_fn=_tied if sys.platform == "linux" else None,
            )
        self.log = log

    @property
    def is_alive(self) -> bool:
        """Tell whether it still runs."""
        return self.process.poll() is None

    def end(self) -> None:
        """End it, and what it has started, and wait until it is gone."""
        if self.is_alive:
            self._tell(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        self._tell(signal.SIGKILL)  # whoever is left of its group
        self.process.wait()

    def _tell(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)  # a group of its own, by `start_new_session`

    def last_words(self, count: int = 5) -> str:
        """Return the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-count:])


class Running(Protocol):
    """What is started, and must be closed however that went."""

    def start(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def kept(running: Running) -> Iterator[None]:
    """Start something and close it in the end; Ctrl-C or SIGTERM ends it, a second one is ignored.

    Closing takes seconds, and an impatient second one would leave processes and folders behind.
    """
    with endable():
        try:
            running.start()
            yield
        finally:
            _deafen()
            running.close()


@contextmanager
def endable() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM be a KeyboardInterrupt, and all later ones nothing."""
    before = {number: signal.getsignal(number) for number in ENDS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as a shell has it for what runs behind it
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _deafen() -> None:
    for number in ENDS:  # by a function: a child would inherit SIG_IGN
        signal.signal(number, _ignore)


def _end(number: int, frame: FrameType | None) -> None:
    _deafen()
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


_SYSTEM = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _tied() -> None:
    """Let the kernel end this process when its parent has gone, however that went."""
    if _SYSTEM is not None:  # loaded before the fork, after which little may be done
        _SYSTEM.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def need_flower() -> None:
    """Say how to get Flower where it is missing, without importing it: we only start it."""
    if find_spec("flwr") is None:
        raise MissingExtra("flwr is not installed: run `pip install 'pliant[deploy]'`")


def need_grpc() -> None:
    """Say how to get gRPC where it is missing, without importing it."""
    if find_spec("grpc") is None:
        raise MissingExtra("grpc is not installed: run `pip install 'pliant[deploy]'`")


def need_port(host: str, port: int) -> None:
    """Say in one line that a port cannot be listened at."""
    if port not in PORTS:
        raise ValueError(f"Expected --port from 1 to 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(f"Expected --host with an address of this machine, got {host!r}") from None
    problems = [_problem(family, address) for family, _, _, _, address in found]
    if errno.EADDRINUSE in problems:
        raise ValueError(f"Cannot listen at {host}:{port}: it is taken; choose another --port")
    if all(problem == errno.EADDRNOTAVAIL for problem in problems):
        raise ValueError(f"Cannot listen at {host}: it is no address of this machine")
    if None not in problems:
        raise ValueError(f"Cannot listen at {host}:{port}: {os.strerror(problems[0] or 0)}")


def _problem(family: int, address: object) -> int | None:
    """Return the number of the error that keeps one from listening, if there is one."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)  # type: ignore[arg-type] # as getaddrinfo gave it
    except OSError as error:
        return error.errno
    return None


def need_keys(host: str, keys: Path | None) -> None:
    """Refuse to serve other machines without keys."""
    if keys is None and host not in LOOPBACK:
        raise ValueError(f"Expected --keys FOLDER for {host}: --insecure is for loopback only")


def reached(host: str, port: int) -> str:
    """Return where a server that listens at a host is found on this machine.

    >>> from pliant.deploy.processes import reached
    >>> reached("0.0.0.0", 9092), reached("::1", 9092), reached("10.0.0.7", 9092)
    ('127.0.0.1:9092', '[::1]:9092', '10.0.0.7:9092')
    """
    if host in ("0.0.0.0", "localhost"):
        return f"127.0.0.1:{port}"
    if host == "::":
        return f"[::1]:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def script(name: str) -> str:
    """Return the path of a command that Flower installs beside our interpreter."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name
