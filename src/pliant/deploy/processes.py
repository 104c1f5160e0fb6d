"""Child processes that end with their parent, and nothing else that ends with them."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from pliant.extras import MissingExtra

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; one by default
}
LOOPBACK = ("127.0.0.1", "::1", "localhost")
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
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"Cannot listen at {host}:{port}: {error}") from None


def need_keys(host: str, keys: Path | None) -> None:
    """Refuse to serve other machines without keys."""
    if keys is None and host not in LOOPBACK:
        raise ValueError(f"Expected --keys FOLDER for {host}: --insecure is for loopback only")


def reached(host: str, port: int) -> str:
    """Return where a server that listens at a host is found on this machine."""
    return f"{'127.0.0.1' if host in ('0.0.0.0', *LOOPBACK) else host}:{port}"


def script(name: str) -> str:
    """Return the path of a command that Flower installs beside our interpreter."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name
