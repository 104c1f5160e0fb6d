"""Run a whole federation on this machine: a server and its devices."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from pliant.deploy.device.host import Limits
from pliant.deploy.security.certificates import check_server_keys, find_device_files
from pliant.deploy.security.enrolment import enrol_local_device
from pliant.deploy.settings import SETTINGS_FILE, ServerSettings, TransportName
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.deploy.supervise.server import ServerSupervisor
from pliant.deploy.versions import ServerKind
from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import EVENTS_FILE
from pliant.experiment.config import Experiment, load_run_config, start_run
from pliant.split import AnySplit
from pliant.value import encode


class Federation:
    """Start a server and devices as processes on loopback; closing ends exactly those."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        settings: ServerSettings | None = None,
        port: int = 9092,
        keys: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        if keys is not None:
            check_server_keys(keys)
        settings = settings or ServerSettings()
        kind = select_server_kind(experiment, settings.transport)
        self.server = ServerSupervisor(kind, folder, settings, port=port, keys=keys)
        open_run(folder, experiment)  # only after every check has passed
        self.devices: list[DeviceSupervisor] = []
        self._stop = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        try:
            for number in range(experiment.fleet.size):
                state, address = folder / "devices" / str(number), self.server.address
                ca, key = None, None
                if keys is not None:
                    if not (state / "keys").exists():
                        enrol_local_device(keys, number, state / "keys")
                    ca, key, _ = find_device_files(state / "keys")
                device = DeviceSupervisor(
                    kind, number, address, state, limits or Limits(), ca=ca, key=key
                )
                self.devices.append(device)
        except BaseException:
            self.close()  # devices have made folders for their sockets
            raise

    def start(self) -> None:
        self.server.start()  # first, as a device with an unregistered key is refused
        for device in self.devices:
            device.start()
        self._supervisor.start()

    def watch(self) -> Iterator[RoundRecord]:
        yield from self.server.watch()

    def close(self) -> None:
        """Stop everything that was started, even if one part fails to stop."""
        with ExitStack() as stack:
            stack.callback(self.server.close)
            for device in reversed(self.devices):
                stack.callback(device.close)
            self._stop.set()
            if self._supervisor.is_alive():
                self._supervisor.join()

    def _supervise(self) -> None:
        while not self._stop.wait(0.2):
            for device in self.devices:
                device.restart_dead()


def select_server_kind(experiment: Experiment, transport: TransportName = "flower") -> ServerKind:
    """Return the kind of server of an experiment; a split one speaks gRPC whatever is asked for."""
    if isinstance(experiment.method, AnySplit):
        return "split"
    return "federated" if transport == "flower" else "federated_grpc"


def open_run(folder: Path, experiment: Experiment) -> None:
    """Start a run in a folder, or resume the same run."""
    if not (folder / "config.json").exists():
        start_run(folder, experiment)
    elif encode(load_run_config(folder)) != encode(experiment):
        raise FileExistsError(f"{folder} holds another run; choose another folder with --out")
    elif not (folder / SETTINGS_FILE).exists() and (folder / EVENTS_FILE).exists():
        raise FileExistsError(f"{folder} holds a simulated run; choose another folder with --out")
