"""What processes share: the settings of a server, the files of a run, and how a process runs.

Some processes must stay small, so importing this does not load torch.
"""

import logging
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import msgspec

from pliant.user_errors import describe_user_error
from pliant.value import Count, NonNegative, Positive, Value

PORTS = range(1, 65536)
# Precedes a request to a worker: when it arrived, by the machine's monotonic clock.
ARRIVAL_HEADER = struct.Struct("<d")
LOG_FORMAT = "%(levelname)s pliant: %(message)s"  # as supervisors forward it
EXIT_REPORTED = 3  # the last line of the log says why the process ended
EXIT_REFUSED = 4  # so does this one, and a restart would not help: the server refuses the device
EXIT_CHANGED = 5  # the server runs another kind of method now
WAITS_FOR_APPROVAL = "its key waits for approval by `pliant server devices approve`"
CONTROL_SECRET_VARIABLE = "PLIANT_CONTROL_SECRET"  # of SuperLink's environment
# Bodies of HTTP requests: Flower sends arrays in chunks of 5 MiB.
OBJECT_BYTES = 6 * 1024 * 1024
HELLO_BYTES = 1024 * 1024  # the largest message before the size of the network is known

# Files in a run folder.
SETTINGS_FILE = "settings.json"
LOCK_FILE = "server.lock"  # held by the supervisor; the run's process holds another
FAILURE_FILE = "failure.txt"  # one line: why the run gave up
PID_FILE = "server.pid"
BYTE_LIMIT_FILE = "max_message_bytes"  # the largest valid message; also in a device's folder

# How long the server waits for a task without a deadline, in round lengths.
MAX_WAIT_ROUNDS = 20
# Whether devices follow their own measurements or the traces of the simulated fleet.
Pace = Literal["measured", "simulated"]
# What carries the messages of federated methods.
TransportName = Literal["flower", "grpc"]
S = TypeVar("S")


class MalformedMessage(ValueError):
    """Bytes that are not a valid message; says what was expected instead."""


class ServerRefusal(PermissionError):
    """The server refuses a device for good; says why in one line."""


class ServerChanged(ConnectionError):
    """The server now runs another kind of method than this process speaks."""


class ServerSettings(Value, frozen=True):
    """How long a server waits for real devices, their clock, and what carries its messages.

    A device has `fleet.round_seconds` from the arrival of its request, and the rules' `grace`. The
    server waits `allowance` longer, as Flower polls every three seconds on both sides and starts a
    process per message. The first round waits up to `patience` for devices, later rounds up to
    `allowance`; then a round starts with the devices that are online. A round without a merged
    update is repeated from the same model, up to `retries` times in a row.
    """

    allowance: NonNegative = 15.0  # seconds
    patience: Positive = 120.0  # seconds to wait for devices at the start, or for a quorum
    retries: Count = 10
    pace: Pace = "measured"
    transport: TransportName = "flower"  # of federated methods


def read_byte_limit(path: Path) -> int:
    """Return the largest message that can be valid, as the process that knows it wrote it."""
    try:
        return max(HELLO_BYTES, int(path.read_text()))
    except (OSError, ValueError):
        return HELLO_BYTES


def run_process(
    main: Callable[[S], None],
    setup_type: type[S],
    reported: tuple[type[Exception], ...] = (),
    *,
    uses_torch: bool = True,
) -> NoReturn:
    """Call `main` with the setup in the command line, and exit; report some errors in one line."""
    if uses_torch:
        import torch

        torch.set_num_threads(1)  # a device shares its machine, and results must not vary with it
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    exit_code = 0
    try:
        main(msgspec.json.decode(sys.argv[1].encode(), type=setup_type))
    except (Exception, SystemExit) as error:
        line = describe_user_error(error)
        if line is None and not isinstance(error, reported):
            raise
        sys.stderr.write(f"{line or error}\n")
        exit_code = EXIT_REFUSED if isinstance(error, ServerRefusal) else EXIT_REPORTED
        exit_code = EXIT_CHANGED if isinstance(error, ServerChanged) else exit_code
    sys.stderr.flush()
    os._exit(exit_code)  # torch and gRPC are slow to shut down
