"""Constants for processes that must stay small: importing them does not load torch."""

import struct

LOOPBACK = ("127.0.0.1", "::1", "localhost")
PORTS = range(1, 65536)
# Precedes a request to a worker: when it arrived, by the machine's monotonic clock.
ARRIVAL_HEADER = struct.Struct("<d")

# Files in a run folder.
SETTINGS_FILE = "settings.json"
LOCK_FILE = "server.lock"  # held by the supervisor; the run's process holds another
FAILURE_FILE = "failure.txt"  # one line: why the run gave up
PID_FILE = "server.pid"
