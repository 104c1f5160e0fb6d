"""The server of a split run on real devices: the simulator's loop with clients on the network.

Methods, guard, ledger, records and checkpoints are the simulator's; only where a client's part is,
and what the clock says, are not. `python -m pliant.deploy.split_serve SETUP` is the process that
`pliant server` starts.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from pliant.deploy.desk import POLL, NotEnough
from pliant.deploy.service import Service
from pliant.deploy.split_echo import FORMAT
from pliant.deploy.split_floor import LiveFloor
from pliant.deploy.split_hub import Hub
from pliant.deploy.split_line import Line
from pliant.deploy.split_remote import Remote
from pliant.deploy.split_worker import TOLD
from pliant.engine.ledger import RoundRecord
from pliant.engine.split import RoundFloor, hall_of, run_split, session_of
from pliant.engine.split_book import Book
from pliant.experiment import Experiment, build, recall
from pliant.params import nbytes
from pliant.split import AnySplit
from pliant.split.client import Here
from pliant.value import encode

SERVICE_FILE = "service.json"
SLACK = 1_000_000  # bytes of a message beside its tensors

log = logging.getLogger("pliant")


class Setup(Struct, frozen=True):
    """What the server's process is told when it is started."""

    folder: str
    host: str
    port: int
    keys: str | None


class SplitService:
    """An experiment with its devices' lines and the door they come through."""

    def __init__(
        self,
        experiment: Experiment,
        service: Service,
        *,
        address: str,
        keys: Path | None,
    ) -> None:
        method = experiment.method
        if not isinstance(method, AnySplit):
            raise ValueError(f"Expected a split method, got {type(method).__name__}")
        self._experiment, self._service, self._method = experiment, service, method
        net, data = build(experiment)
        self.lines = {client: Line(client, service.allowance) for client in range(len(data))}
        self.remotes: dict[int, Remote] = {}
        largest = 0

        def settle(here: Here) -> Remote:
            nonlocal largest
            largest = max(largest, nbytes(here.state()))
            bound = experiment.setting.guard.largest
            self.remotes[here.number] = Remote(self.lines[here.number], here, bound)
            return self.remotes[here.number]

        fleet, seed = experiment.fleet, experiment.seed
        self._session = session_of(method, net, data, fleet, seed, settle=settle)
        sent = method.payload.dense(method.local.batch * math.prod(self._session.shape))
        self.hub = Hub(
            self.lines,
            encode(experiment),
            address=address,
            keys=keys,
            largest=2 * max(largest, sent) + SLACK,
        )
        self._has_begun = False

    def rounds(self, folder: Path) -> Iterator[RoundRecord]:
        """Run all rounds, or those that are left, and yield their records."""
        setting = msgspec.structs.replace(self._experiment.setting, checkpoint_every=1)
        self.hub.start()
        try:
            yield from run_split(self._method, self._session, setting, self._floor, folder=folder)
        finally:
            self.hub.close()

    def _floor(self, number: int, clock: float) -> RoundFloor:
        self._gather()
        experiment, session = self._experiment, self._session
        fleet, setting = experiment.fleet, experiment.setting
        if self._service.pace == "fleet":

            def has_gone(client: int) -> bool:
                remote = self.remotes[client]
                while remote.complaints:
                    hall.refuse(client, remote.complaints.pop())
                return not remote.line.is_in

            speed = experiment.server_speed
            hall = hall_of(session, fleet, setting, number, clock, speed, has_gone=has_gone)
            return hall
        book = Book(session.data.train.classes, session.owned, setting.guard.largest)
        full = session.visits * session.device_training
        return LiveFloor(fleet, full, self.remotes, book, seed=setting.seed)

    def _gather(self) -> None:
        """Take in who is there; wait for all at first, and later only for a quorum.

        Who does not come in time is gone on without: also by a server that was started again, which
        does not know who had gone before.
        """
        least = max(1, self._experiment.rules.needed(len(self.remotes)))
        wanted = least if self._has_begun else len(self.remotes)
        end = time.monotonic() + self._service.patience
        while (here := self._taken_in()) < wanted:
            if time.monotonic() > end:
                if here >= least:
                    break
                raise NotEnough(f"waited for {least} devices or more, {here} came")
            time.sleep(min(POLL, 0.05))
        self._has_begun = True

    def _taken_in(self) -> int:
        """Take in who is there; return how many are."""
        here = 0
        for device, remote in self.remotes.items():
            was_in = remote.line.is_in
            if remote.rejoin():
                here += 1
                if not was_in:
                    log.info("device %s has come in", device)
        return here


def main(setup: Setup) -> int:
    """Run the experiment of a folder, or go on with it."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    log.setLevel(logging.INFO)
    folder = Path(setup.folder)
    keys = None if setup.keys is None else Path(setup.keys)
    try:
        service = msgspec.json.decode((folder / SERVICE_FILE).read_bytes(), type=Service)
        host = f"[{setup.host}]" if ":" in setup.host else setup.host
        address = f"{host}:{setup.port}"
        served = SplitService(recall(folder), service, address=address, keys=keys)
        for _ in served.rounds(folder):
            pass  # the folder tells it all
    except (ValueError, OSError, NotEnough) as error:
        sys.stderr.write(f"{error}\n")
        return TOLD
    return 0


if __name__ == "__main__":
    code = main(msgspec.json.decode(sys.argv[1].encode(), type=Setup))
    sys.stderr.flush()
    os._exit(code)  # torch and gRPC take their time to leave
