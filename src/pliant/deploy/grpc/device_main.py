"""The process of a split device: `python -m pliant.deploy.grpc.device_main SETUP`."""

from pathlib import Path

from pliant import runtime
from pliant.deploy.device.heartbeat import Heartbeat
from pliant.deploy.device.host import DeviceSetup
from pliant.deploy.grpc.client import GrpcClient
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.settings import run_process


def main(setup: DeviceSetup) -> None:
    runtime.retain_freed_memory()
    ca, key = (None if path is None else Path(path) for path in (setup.ca, setup.key))
    device = SplitDevice(setup.device, Path(setup.folder), setup.limits)
    heartbeat = Heartbeat(Path(setup.heartbeat))
    heartbeat.start()
    GrpcClient(device, setup.server, setup.process, ca=ca, key=key, heartbeat=heartbeat).run()


if __name__ == "__main__":
    run_process(main, DeviceSetup, (ValueError, OSError, LookupError))
