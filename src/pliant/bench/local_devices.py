"""Device processes of this machine, each on one core, and a busy program that takes one away.

The rounds are those of `pliant server`. Requests go through the devices' own sockets, as Flower's
polling would blur the times.
"""

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pliant.deploy.device.host import DeviceSetup, Limits
from pliant.deploy.device.worker_call import call_worker
from pliant.deploy.messages import AnyMessage, TrainRequest, encode_for_devices, encode_message
from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import DeviceTransport
from pliant.deploy.server.serve import serve
from pliant.deploy.settings import ARRIVAL_HEADER, ServerSettings
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    make_command,
    make_process_env,
    read_log_tail,
)
from pliant.engine.ledger import RoundRecord
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.config import Experiment

BUSY = "import time; print(time.monotonic(), flush=True)\nwhile True: pass"
PIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"  # noqa: E501
REPLY_SECONDS = 600.0  # after which a device process counts as hung
POLL_SECONDS = 0.01


def pin_command(core: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one on one core only."""
    return [sys.executable, "-S", "-c", PIN, str(core), *command]


def start_busy_program(core: int, log: Path) -> ChildProcess:
    """Start a program that uses a core without end; the last line of its log says since when."""
    command = pin_command(core, [sys.executable, "-S", "-c", BUSY])
    return ChildProcess(command, log, make_process_env(log.parent))


@dataclass(frozen=True)
class Disturbance:
    """A busy program on one core in every round, from and until these seconds."""

    core: int
    start: float
    end: float
    log: Path


class SocketTransport:
    """A transport to device processes of this machine."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self._sockets = sockets
        self._replies: list[RawReply] = []
        self._disturber: threading.Thread | None = None
        self.hello_replies: dict[int, bytes] = {}
        self.disturbance: Disturbance | None = None
        self.disturbed: list[tuple[float, float]] = []  # seconds of each round, as measured

    def greet(self, experiment: Experiment) -> None:
        """Let the devices build the network of an experiment, calibrate and declare their data."""
        hello = encode_message(TrainRequest("hello", encode_for_devices(experiment), -1))
        for device in range(len(self._sockets)):
            self.hello_replies[device] = self._call(device, hello)

    def find_online_devices(self) -> set[int]:
        return set(range(len(self._sockets)))

    def find_lost_devices(self) -> set[int]:
        return set()

    def send(
        self, requests: Mapping[int, AnyMessage], *, round: int, seconds: float, adds: bool = False
    ) -> None:
        self.wait_for_disturber()
        self._replies = []
        start = time.monotonic()
        for device, raw in requests.items():
            threading.Thread(target=self._request, args=(device, bytes(raw)), daemon=True).start()
        if self.disturbance is not None:
            arguments = (self.disturbance, start)
            self._disturber = threading.Thread(target=self._disturb, args=arguments, daemon=True)
            self._disturber.start()

    def wait_for_disturber(self) -> None:
        """Wait until the busy program has ended: it belongs to one round."""
        if self._disturber is not None:
            self._disturber.join()

    def poll_replies(self) -> list[RawReply]:
        replies, self._replies = self._replies, []
        return replies

    def count_carrier_bytes(self, size: int) -> int:
        return 0  # messages stay on this machine

    def _call(self, device: int, request: bytes) -> bytes:
        message = ARRIVAL_HEADER.pack(time.monotonic()) + request
        return call_worker(self._sockets[device], message, REPLY_SECONDS)

    def _request(self, device: int, request: bytes) -> None:
        try:
            raw = self._call(device, request)
        except EOFError:  # stopped before its late reply
            return
        self._replies.append(RawReply(device, raw))  # the list may have been replaced meanwhile

    def _disturb(self, disturbance: Disturbance, start: float) -> None:
        time.sleep(max(0.0, start + disturbance.start - time.monotonic()))
        program = start_busy_program(disturbance.core, disturbance.log)
        time.sleep(max(0.0, start + disturbance.end - time.monotonic()))
        program.stop()
        end = time.monotonic()
        line = read_log_tail(disturbance.log, 1)  # empty if a busy machine did not let it start
        since = float(line) if line and float(line) > start else end
        self.disturbed.append((since - start, end - start))


@contextmanager
def open_devices(
    folder: Path, cores: Sequence[int], limits: Sequence[Limits]
) -> Iterator[SocketTransport]:
    """Start one device process per core, and stop them at the end; their logs are in the folder."""
    children, sockets = [], []
    socket_folder = tempfile.mkdtemp(prefix="pliant-")
    env = make_process_env(folder)
    try:
        for number, (core, own_limits) in enumerate(zip(cores, limits, strict=True)):
            socket = f"{socket_folder}/{number}"
            state = str(folder / f"device{number}")
            setup = DeviceSetup(number, state, own_limits, socket=socket, idle_seconds=3600.0)
            command = pin_command(core, make_command("pliant.deploy.device.worker", setup))
            children.append(ChildProcess(command, folder / f"worker{number}.log", env))
            sockets.append(socket)
        transport = SocketTransport(sockets)
        yield transport
        transport.wait_for_disturber()
    finally:
        for child in children:
            child.stop()
        shutil.rmtree(socket_folder, ignore_errors=True)


def serve_rounds(
    experiment: Experiment, context: WorkerContext, transport: SocketTransport, folder: Path
) -> Iterator[RoundRecord]:
    """Run the rounds of an experiment on device processes and yield their records."""
    transport.greet(experiment)
    settings = ServerSettings(allowance=experiment.fleet.round_seconds, retries=experiment.rounds)
    devices = DeviceTransport(
        experiment, settings, transport, sleep=lambda _: time.sleep(POLL_SECONDS)
    )
    yield from serve(context, devices, folder)
    transport.wait_for_disturber()
