"""A whole federation on this machine: a server and its devices, up and down together."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pliant.deploy.host import Limits
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
        open_run(folder, experiment)
        self.server = serving(experiment)(folder, service or Service(), port=port, keys=keys)
        is_split = isinstance(experiment.method, AnySplit)
        self.devices: list[RemoteDevice | SplitRemoteDevice] = [
            (SplitRemoteDevice if is_split else RemoteDevice)(
                number,
                self.server.address,
                folder / "devices" / str(number),
                limits or Limits(),
                ca=None if keys is None else keys / "ca.crt",
                key=None if keys is None else keys / "devices" / str(number) / "key",
                cpu=cpus[number] if cpus else None,
            )
            for number in range(experiment.fleet.size)
        ]
        self._stop = threading.Event()
        self._nurse = threading.Thread(target=self._mend, daemon=True)

    def __enter__(self) -> "Federation":
        try:
            self.server.start()  # first: a device whose key is not yet known is sent away
            for device in self.devices:
                device.start()
            self._nurse.start()
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
        """End what was started."""
        self._stop.set()
        if self._nurse.is_alive():
            self._nurse.join()
        for device in self.devices:
            device.close()
        self.server.close()

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
