"""A whole federation on this machine: a server and its devices, up and down together."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from pliant.deploy.host import Limits
from pliant.deploy.keys import need_fleet
from pliant.deploy.remote import RemoteDevice
from pliant.deploy.server import Server
from pliant.deploy.service import Service
from pliant.deploy.split_node import SplitRemoteDevice
from pliant.deploy.split_server import SplitServer
from pliant.engine.ledger import RoundRecord
from pliant.experiment import Experiment, begin, recall
from pliant.split import AnySplit
from pliant.value import encode


class Federation:
    """Real processes on loopback; ending it ends exactly what it started."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        service: Service | None = None,
        port: int = 9092,
        keys: Path | None = None,
        limits: Limits | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        if keys is not None:
            need_fleet(keys, experiment.fleet.size)
        self.server = serving(experiment)(folder, service or Service(), port=port, keys=keys)
        open_run(folder, experiment)  # after all that can be wrong
        kind = SplitRemoteDevice if isinstance(experiment.method, AnySplit) else RemoteDevice
        self.devices: list[RemoteDevice | SplitRemoteDevice] = []
        self._stop = threading.Event()
        self._nurse = threading.Thread(target=self._mend, daemon=True)
        try:
            for number in range(experiment.fleet.size):
                device = kind(
                    number,
                    self.server.address,
                    folder / "devices" / str(number),
                    limits or Limits(),
                    ca=None if keys is None else keys / "ca.crt",
                    key=None if keys is None else keys / "devices" / str(number) / "key",
                    cpu=cpus[number] if cpus else None,
                )
                self.devices.append(device)
        except BaseException:
            self.close()  # devices have folders for their sockets
            raise

    def start(self) -> None:
        """Start the server and its devices."""
        self.server.start()  # first: a device whose key is not yet known is sent away
        for device in self.devices:
            device.start()
        self._nurse.start()

    def __enter__(self) -> "Federation":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def watch(self) -> Iterator[RoundRecord]:
        """Yield the records of rounds as they end."""
        yield from self.server.watch()

    def close(self) -> None:
        """End what was started: the rest, too, if one part fails to."""
        with ExitStack() as stack:
            stack.callback(self.server.close)
            for device in reversed(self.devices):
                stack.callback(device.close)
            self._stop.set()
            if self._nurse.is_alive():
                self._nurse.join()

    def _mend(self) -> None:
        while not self._stop.wait(0.2):
            for device in self.devices:
                device.mend()


def serving(experiment: Experiment) -> type[Server] | type[SplitServer]:
    """Return the server that an experiment's method asks for."""
    return SplitServer if isinstance(experiment.method, AnySplit) else Server


def open_run(folder: Path, experiment: Experiment) -> None:
    """Begin a run in a folder, or go on with the same one."""
    if not (folder / "config.json").exists():
        begin(folder, experiment)
    elif encode(recall(folder)) != encode(experiment):
        raise FileExistsError(f"{folder} holds another run: choose another folder by --out")
