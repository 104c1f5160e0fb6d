"""Pass a request to a device's worker process; importing this does not load torch."""

import time
from multiprocessing.connection import Client
from pathlib import Path

CONNECT_SECONDS = 120.0  # a dead worker must be back by then, on a busy machine too


def call_worker(socket: str, request: bytes, seconds: float) -> bytes:
    """Pass a request to the worker and return its reply; raise TimeoutError if it comes late."""
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = Client(socket, family="AF_UNIX")
            break
        except OSError:
            if time.monotonic() > end:
                raise
            Path(f"{socket}.wanted").touch()  # the worker may have exited while idle
            time.sleep(0.2)
    with connection:
        connection.send_bytes(request)
        if not connection.poll(seconds):
            raise TimeoutError
        return connection.recv_bytes()
