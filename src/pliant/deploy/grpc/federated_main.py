"""The server of federated rounds over gRPC: the simulator's rounds without Flower.

`pliant server --transport grpc` starts `python -m pliant.deploy.grpc.federated_main SETUP`.
"""

import logging
from pathlib import Path

from pliant import runtime
from pliant.deploy.grpc.server import GrpcServerSetup
from pliant.deploy.grpc.transport import GrpcTransport
from pliant.deploy.server.rounds import DeviceTransport, NotEnoughDevices
from pliant.deploy.server.serve import prepare_run, serve
from pliant.deploy.settings import run_process

log = logging.getLogger("pliant")


def main(setup: GrpcServerSetup) -> None:
    log.setLevel(logging.INFO)
    runtime.raise_file_limit()  # a device is a connection
    folder, keys = Path(setup.folder), None if setup.keys is None else Path(setup.keys)
    prepared = prepare_run(folder)
    messages = GrpcTransport(
        prepared.hello,
        prepared.experiment.fleet.size,
        address=setup.address,
        keys=keys,
        max_reply_bytes=prepared.max_reply_bytes,
        folder=folder,
    )
    devices = DeviceTransport(prepared.experiment, prepared.settings, messages, sleep=messages.wait)
    messages.start()
    try:
        for _ in serve(prepared.context, devices, folder):
            pass  # the records are in the folder
    finally:
        messages.close()


if __name__ == "__main__":
    run_process(main, GrpcServerSetup, (ValueError, OSError, NotEnoughDevices))
