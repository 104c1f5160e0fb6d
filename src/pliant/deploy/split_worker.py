"""The process of a device of split learning: `python -m pliant.deploy.split_worker SETUP`."""

import logging
import os
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from pliant import memory
from pliant.deploy.host import Limits
from pliant.deploy.split_echo import FORMAT

TOLD = 3  # exit code of a process that has said in one line why it ends


class Setup(Struct, frozen=True):
    """What a device's process is told when it is started."""

    device: int
    server: str
    folder: str
    limits: Limits
    process: str  # the same one when it is started again
    ca: str | None
    key: str | None


def work(setup: Setup) -> int:
    """Train whenever the server asks for it."""
    from pliant.deploy.device import single_threaded
    from pliant.deploy.split_device import SplitDevice
    from pliant.deploy.split_stream import Dialler

    single_threaded()
    memory.keep()
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    ca, key = (None if path is None else Path(path) for path in (setup.ca, setup.key))
    try:
        device = SplitDevice(setup.device, Path(setup.folder), setup.limits)
        Dialler(device, setup.server, process=setup.process, ca=ca, key=key).attend()
    except (ValueError, OSError, LookupError) as error:
        sys.stderr.write(f"{error}\n")
        return TOLD
    return 0


if __name__ == "__main__":
    code = work(msgspec.json.decode(sys.argv[1].encode(), type=Setup))
    sys.stderr.flush()
    os._exit(code)  # torch and gRPC take their time to leave
