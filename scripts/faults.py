"""What can go wrong with a federation on this machine, done to it on purpose."""

import os
import random
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import suppress

from pliant.deploy.federation import Federation

JUNK = bytes(1_000_000)


class Proxy:
    """A TCP proxy in front of the server whose manners can be changed."""

    def __init__(self, port: int) -> None:
        self._server = port
        self.manner = "plain"
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            if self.manner == "reset":
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                near.close()
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        carried = 0
        with suppress(OSError):
            while part := source.recv(65536):
                manner = self.manner
                if manner == "delay":
                    time.sleep(0.5)
                elif manner == "half" and carried > 20_000:
                    time.sleep(3600)  # open, and silent for ever
                elif manner == "reset" and carried > 20_000:
                    break
                elif manner == "slow":
                    for byte in part:
                        sink.sendall(bytes([byte]))
                        time.sleep(1.0)
                        if self.manner != "slow":
                            break
                sink.sendall(part)
                carried += len(part)
        for end in (source, sink):
            with suppress(OSError):
                end.close()

    def close(self) -> None:
        self._listening.close()


def kill(pid: int | None) -> bool:
    """Send SIGKILL; tell whether there was somebody."""
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def kill_devices(
    federation: Federation, kills: int, luck: random.Random, pauses: tuple[float, float]
) -> Counter[str]:
    """Kill parts of devices at random moments from another thread; return what was hit."""
    hit: Counter[str] = Counter()

    def go_on() -> None:
        for _ in range(kills):
            time.sleep(luck.uniform(*pauses))
            device = luck.choice(federation.devices)
            victims = device.pids
            name = luck.choice(["worker", "worker", "supernode", "all"])
            for part, pid in victims.items():
                if name in (part, "all") and kill(pid):
                    hit[part] += 1

    threading.Thread(target=go_on, daemon=True).start()
    return hit


def kill_server(
    federation: Federation, kills: int, luck: random.Random, pauses: tuple[float, float]
) -> Counter[str]:
    """Kill the run's process or SuperLink at random moments from another thread."""
    hit: Counter[str] = Counter()

    def go_on() -> None:
        for number in range(kills):
            time.sleep(luck.uniform(*pauses))
            name = "superlink" if number % 4 == 3 else "run"
            pids = federation.server.pids
            if kill(pids.get(name)):
                hit[name] += 1

    threading.Thread(target=go_on, daemon=True).start()
    return hit


def hang(federation: Federation, luck: random.Random, seconds: float) -> str:
    """Stop a process of a device for a while; return which."""
    name = luck.choice(["worker", "supernode"])
    pid = luck.choice(federation.devices).pids.get(name)
    if pid is None:
        return "nobody"
    os.kill(pid, signal.SIGSTOP)

    def wake() -> None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    threading.Thread(target=wake, daemon=True).start()
    return name


def flood(port: int, seconds: float) -> Counter[str]:
    """Throw junk at the server's port from eight threads for a while; return what it said."""
    said: Counter[str] = Counter()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    end = time.monotonic() + seconds
    head = b"POST /v1/fleet/push-messages HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"

    def throw() -> None:
        while time.monotonic() < end:
            try:
                plain = socket.create_connection(("127.0.0.1", port), 5.0)
                with context.wrap_socket(plain) as link:
                    link.sendall(head % len(JUNK) + JUNK)
                    said[link.recv(64).split(b"\r\n")[0].decode(errors="replace")] += 1
            except OSError as error:
                said[type(error).__name__] += 1

    for _ in range(8):
        threading.Thread(target=throw, daemon=True).start()
    return said
