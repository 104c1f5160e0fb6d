"""Wait for an event as long as a busy machine may need."""

import time
from contextlib import suppress
from multiprocessing.connection import Client

LIMIT = 600.0  # seconds; only a failure takes that long


def wait_until(condition, description):
    """Return the first true value of a condition."""
    end = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {LIMIT:g} s for {description}"
        time.sleep(0.05)
    return value


def connect_unix(path):
    """Connect to a Unix socket as soon as a server listens on it."""

    def connect():
        with suppress(FileNotFoundError, ConnectionRefusedError):  # not yet
            return Client(str(path), "AF_UNIX")

    return wait_until(connect, f"a server at {path}")
