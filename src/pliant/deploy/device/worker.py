"""The worker process of a device: it keeps the network in memory and handles requests.

It runs as `python -m pliant.deploy.device.worker SETUP`, so that a crash in training leaves the
device connected, and so that its memory is released after a long idle time.
"""

import struct
import time
from multiprocessing.connection import Listener
from pathlib import Path

from pliant import runtime
from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.heartbeat import Heartbeat
from pliant.deploy.device.host import DeviceSetup
from pliant.deploy.settings import ARRIVAL_HEADER, run_process


def run_worker(setup: DeviceSetup, agent_class: type[DeviceAgent] = DeviceAgent) -> None:
    """Handle requests until none has come for `idle_seconds`."""
    runtime.retain_freed_memory()
    path = Path(setup.socket)
    path.unlink(missing_ok=True)
    heartbeat = Heartbeat(Path(setup.heartbeat or f"{setup.socket}.heartbeat"))
    heartbeat.start()
    agent = agent_class(setup.device, Path(setup.folder), setup.limits)
    agent.on_step = heartbeat.note_progress
    with Listener(setup.socket, family="AF_UNIX") as listener:
        path.chmod(0o600)
        # touched while this started; left behind, it would restart a worker that ends when idle
        Path(f"{setup.socket}.wanted").unlink(missing_ok=True)
        inner = listener._listener._socket  # type: ignore[attr-defined] # there is no public API
        inner.settimeout(setup.idle_seconds)
        idle_since = 0.0
        while True:
            try:
                connection = listener.accept()
            except TimeoutError:
                return
            with connection:
                try:
                    raw = connection.recv_bytes()
                    (arrived_at,) = ARRIVAL_HEADER.unpack_from(raw)
                    queued = max(0.0, idle_since - arrived_at)
                    with heartbeat.working():
                        reply = agent.handle_request(raw[ARRIVAL_HEADER.size :], queued=queued)
                    idle_since = time.monotonic()
                    connection.send_bytes(reply)
                    runtime.release_freed_memory()
                except (EOFError, OSError, struct.error):  # the client app is gone
                    continue


if __name__ == "__main__":
    run_process(run_worker, DeviceSetup)
