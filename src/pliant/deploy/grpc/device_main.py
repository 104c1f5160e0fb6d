"""The process of a split device: `python -m pliant.deploy.grpc.device_main SETUP`."""

import logging
import os
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from pliant import runtime
from pliant.deploy.constants import LOG_FORMAT
from pliant.deploy.device.host import Limits

EXIT_REPORTED = 3  # the last line of the log says why the process ended


class SplitDeviceSetup(Struct, frozen=True):
    """The arguments of a device's process."""

    device: int
    server: str
    folder: str
    limits: Limits
    process: str  # stays the same after a restart
    ca: str | None
    key: str | None


def main(setup: SplitDeviceSetup) -> int:
    from pliant.deploy.device.agent import use_one_thread
    from pliant.deploy.grpc.client import GrpcClient
    from pliant.deploy.grpc.device import SplitDevice

    use_one_thread()
    runtime.retain_freed_memory()
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    ca, key = (None if path is None else Path(path) for path in (setup.ca, setup.key))
    try:
        device = SplitDevice(setup.device, Path(setup.folder), setup.limits)
        GrpcClient(device, setup.server, process=setup.process, ca=ca, key=key).run()
    except (ValueError, OSError, LookupError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REPORTED
    return 0


if __name__ == "__main__":
    code = main(msgspec.json.decode(sys.argv[1].encode(), type=SplitDeviceSetup))
    sys.stderr.flush()
    os._exit(code)  # torch and gRPC are slow to shut down
