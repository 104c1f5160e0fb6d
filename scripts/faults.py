"""Inject faults into a federation on this machine."""

import os
import random
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import suppress

from pliant.deploy.supervise.federation import Federation

# A valid protobuf message, so that the server reads and decodes all of it before it asks who sent
# it: field 15, which no request has, with 2**20 zeros.
JUNK = b"\x7a\x80\x80\x40" + bytes(2**20)


class Proxy:
    """A TCP proxy in front of the server that misbehaves by its `mode`."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.mode = "plain"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                device, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "reset":
                device.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                device.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                device.close()
                continue
            for pair in ((device, server), (server, device)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        forwarded = 0
        with suppress(OSError):
            while data := source.recv(65536):
                mode = self.mode
                if mode == "delay":
                    time.sleep(0.5)
                elif mode == "half" and forwarded > 20_000:
                    time.sleep(3600)  # stay open, but silent
                elif mode == "reset" and forwarded > 20_000:
                    break
                elif mode == "slow":
                    for byte in data:
                        target.sendall(bytes([byte]))
                        time.sleep(1.0)
                        if self.mode != "slow":
                            break
                target.sendall(data)
                forwarded += len(data)
        for connection in (source, target):
            with suppress(OSError):
                connection.close()

    def close(self) -> None:
        self._listener.close()


def kill(pid: int | None) -> bool:
    """Send SIGKILL; return whether the process existed."""
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def kill_devices(
    federation: Federation, kills: int, rng: random.Random, pauses: tuple[float, float]
) -> Counter[str]:
    """Kill processes of devices at random times in a thread; return their counts, which grow."""
    hits: Counter[str] = Counter()

    def run() -> None:
        for _ in range(kills):
            time.sleep(rng.uniform(*pauses))
            pids = rng.choice(federation.devices).pids
            target = rng.choice(["worker", "worker", "supernode", "all"])
            for name, pid in pids.items():
                if target in (name, "all") and kill(pid):
                    hits[f"killed {name}"] += 1

    threading.Thread(target=run, daemon=True).start()
    return hits


def kill_server(
    federation: Federation, kills: int, rng: random.Random, pauses: tuple[float, float]
) -> Counter[str]:
    """Kill the run's process or SuperLink at random times in a thread; return their counts."""
    hits: Counter[str] = Counter()

    def run() -> None:
        for number in range(kills):
            time.sleep(rng.uniform(*pauses))
            name = "superlink" if number % 4 == 3 else "run"
            if kill(federation.server.pids.get(name)):
                hits[f"killed {name}"] += 1

    threading.Thread(target=run, daemon=True).start()
    return hits


def suspend(federation: Federation, rng: random.Random, suspended: list[int]) -> Counter[str]:
    """Suspend a process of a device; return its name and add it to a list."""
    name = rng.choice(["worker", "supernode"])
    pid = rng.choice(federation.devices).pids.get(name)
    if pid is None:
        return Counter()
    os.kill(pid, signal.SIGSTOP)
    suspended.append(pid)
    return Counter([f"suspended {name}"])


def resume(suspended: list[int]) -> None:
    """Resume the processes of a list and empty it."""
    while suspended:
        with suppress(ProcessLookupError):
            os.kill(suspended.pop(), signal.SIGCONT)


def flood(port: int, seconds: float) -> Counter[str]:
    """Send junk to the server's port from eight threads; return its replies, which grow."""
    replies: Counter[str] = Counter()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    end = time.monotonic() + seconds
    header = b"POST /v1/fleet/push-messages HTTP/1.1\r\nHost: x\r\n"
    header += b"Content-Type: application/protobuf\r\nContent-Length: %d\r\n\r\n" % len(JUNK)

    def send_junk() -> None:
        while time.monotonic() < end:
            try:
                plain = socket.create_connection(("127.0.0.1", port), 300.0)
                with context.wrap_socket(plain) as connection:
                    connection.sendall(header + JUNK)
                    status = connection.recv(64).split(b"\r\n")[0]
                    replies[status.decode(errors="replace")] += 1
            except OSError as error:
                replies[type(error).__name__] += 1

    for _ in range(8):
        threading.Thread(target=send_junk, daemon=True).start()
    return replies
