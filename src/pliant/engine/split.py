"""Split learning in virtual time, on the same fleet and with the same records as federated runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from torch import nn

from pliant.data import Federated
from pliant.devices import Fleet
from pliant.engine.evaluate import Personal, accuracy_of
from pliant.engine.ledger import RoundRecord, TaskRecord, summed
from pliant.engine.rules import departures
from pliant.engine.simulate import Setting
from pliant.engine.split_floor import Hall, Wire
from pliant.engine.store import Saved, Store
from pliant.engine.workers import one_thread
from pliant.methods.base import State
from pliant.params import Params, digest
from pliant.split.base import Floor, Local
from pliant.split.server import Masked
from pliant.split.session import Session, Settle


class SplitMethod(Protocol):
    """A split method as the engine sees it."""

    @property
    def cut(self) -> str: ...

    @property
    def local(self) -> Local: ...

    @property
    def has_head(self) -> bool: ...

    @property
    def threshold(self) -> float: ...

    def begin(self, session: Session) -> None:
        """Give the clients and the server their parts."""

    def train(self, session: Session, floor: Floor, number: int, rounds: int) -> None:
        """Train for one round."""


def simulate_split(
    method: SplitMethod,
    net: nn.Module,
    data: Federated,
    fleet: Fleet,
    *,
    setting: Setting | None = None,
    server_speed: float | None = None,
    folder: Path | None = None,
    is_dry: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
    wire: Wire | None = None,
) -> Iterator[RoundRecord]:
    """Train a network that is cut between the clients and a server; yield a record of each round.

    Every device of the data is a client in every round that it is there for. `server_speed` is the
    server's MAC/s; without it, its time is not charged. A dry run goes through every mini-batch and
    charges for dense activations, but computes nothing. `wire` may change what clients send on its
    way: for tests of the guard. Folders, checkpoints and `is_stopped` are as in `simulate`.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.Images.from_tensors(torch.rand(24, 3, 32, 32), torch.arange(24) % 10)
    >>> data = pl.data.Source(images, images).share(pl.Iid(), devices=2, proxy=8)
    >>> method, net = pl.AdaSplit(kappa=0.0), pl.models.lenet_small(classes=10)
    >>> fleet, setting = pl.Fleet(size=2), pl.Setting(rounds=1)
    >>> [record] = pl.simulate_split(method, net, data, fleet, setting=setting)
    >>> record.tasks, record.up > record.down
    (2, True)
    """
    setting = setting or Setting()
    session = session_of(method, net, data, fleet, setting.seed, is_dry=is_dry)

    def floor(number: int, clock: float) -> Hall:
        return hall_of(session, fleet, setting, number, clock, server_speed, wire=wire)

    return run_split(method, session, setting, floor, folder=folder, is_stopped=is_stopped)


def session_of(
    method: SplitMethod,
    net: nn.Module,
    data: Federated,
    fleet: Fleet,
    seed: int,
    *,
    is_dry: bool = False,
    settle: Settle | None = None,
    only: int | None = None,
) -> Session:
    """Cut a network and give the clients and the server their parts."""
    if fleet.size < len(data):
        raise ValueError(f"Expected a fleet of at least {len(data)} clients, got {fleet.size}")
    session = Session(
        net,
        data,
        method.local,
        method.cut,
        seed=seed,
        has_head=method.has_head,
        is_dry=is_dry,
        settle=settle,
        only=only,
    )
    method.begin(session)
    return session


def run_split(
    method: SplitMethod,
    session: Session,
    setting: Setting,
    floor: Callable[[int, float], "RoundFloor"],
    *,
    folder: Path | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RoundRecord]:
    """Train round by round, wherever the clients are, and yield a record of each.

    `floor` makes what a round takes place on, of the round's number and the clock at its start.
    """
    with one_thread():
        yield from _run(method, session, setting, floor, folder, is_stopped)


def _run(
    method: SplitMethod,
    session: Session,
    setting: Setting,
    floor: Callable[[int, float], "RoundFloor"],
    folder: Path | None,
    is_stopped: Callable[[], bool],
) -> Iterator[RoundRecord]:
    store = Store(folder) if folder is not None else None
    try:
        saved = store.resume() if store else None
        first, clock = 0, 0.0
        if saved is not None:
            first, clock = saved.round, saved.seconds
            _restore(session, saved)
        for number in range(first, setting.rounds):
            ground = floor(number, clock)
            method.train(session, ground, number, setting.rounds)
            records = ground.records(number)
            clock += ground.close()
            total = summed(number, clock, records)
            is_last = number + 1 == setting.rounds
            is_over = is_last or is_stopped()
            if not session.is_dry and (is_last or (number + 1) % setting.evaluation.every == 0):
                personal = _tested(session, method, setting)
                total = msgspec.structs.replace(total, personal=personal)
            if is_last:
                total = msgspec.structs.replace(total, digest=digest(_everything(session)))
            if store:
                store.append([*records, total])
                if is_over or (number + 1) % setting.checkpoint_every == 0:
                    store.save(_saved(session, number + 1, clock, is_last=is_last))
            yield total
            if is_over:
                return
    finally:
        if store:
            store.close()


class RoundFloor(Floor, Protocol):
    """A floor for one round, which tells what the round has cost."""

    def records(self, number: int) -> list[TaskRecord]:
        """Return what each client that was here has cost, and how it ended."""

    def close(self) -> float:
        """Return how long the round has lasted."""


def hall_of(
    session: Session,
    fleet: Fleet,
    setting: Setting,
    number: int,
    clock: float,
    server_speed: float | None,
    *,
    wire: Wire | None = None,
    has_gone: Callable[[int], bool] | None = None,
) -> Hall:
    """Return the floor of a round in virtual time."""
    clients = np.arange(len(session.data))
    return Hall(
        fleet,
        session.visits * session.device_training,
        seed=setting.seed,
        start=clock,
        leaves=departures(
            setting.rules, clients, seed=setting.seed, round=number, length=fleet.round_seconds
        ),
        server_speed=server_speed,
        classes=session.data.train.classes,
        owned=session.owned,
        largest=setting.guard.largest,
        wire=wire or (lambda client, message: message),
        has_gone=has_gone or (lambda client: False),
    )


def _tested(session: Session, method: SplitMethod, setting: Setting) -> Personal:
    """Test each client's whole network on its own images."""

    def accuracies(server: Callable[[int], Params]) -> tuple[float, ...]:
        return tuple(
            accuracy_of(
                session.net,
                session.joined(client, server(client)),
                session.data,
                client,
                setting.evaluation,
            )
            for client in range(len(session.data))
        )

    served = session.served
    shut: tuple[float, ...] = ()
    if method.threshold and isinstance(served, Masked):
        masked = served
        shut = accuracies(lambda client: masked.effective(client, method.threshold))
    return Personal(accuracies(served.effective), shut=shut)


# A run on disk: the server's part as the state, what else a method keeps as its extra, and each
# client's part as a device's memory.


def _saved(session: Session, number: int, clock: float, *, is_last: bool) -> Saved:
    server = session.served.state()
    memory = {client: part.state() for client, part in session.clients.items()}
    if is_last:  # nobody goes on from here: optimisers' memories would be two thirds of the file
        server = _weights(server)
        memory = {client: _weights(state) for client, state in memory.items()}
    return Saved(number, clock, State(server, dict(session.notes)), memory)


def _weights(state: Params) -> Params:
    return {name: tensor for name, tensor in state.items() if "params/" in name}


def _restore(session: Session, saved: Saved) -> None:
    if "time" not in saved.memory.get(0, {"time": 0}):
        return  # the run is over
    session.served.restore(saved.state.params)
    session.notes.update(saved.state.extra)
    for client, state in saved.memory.items():
        session.clients[client].restore(state)


def _everything(session: Session) -> Params:
    found = {f"server/{name}": tensor for name, tensor in session.served.state().items()}
    for client, part in session.clients.items():
        found |= {f"client{client}/{name}": tensor for name, tensor in part.state().items()}
    return found
