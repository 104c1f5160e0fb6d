"""Simulate split learning in virtual time, with the same fleet and records as federated runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import nn

from pliant.data import FederatedData, ImageDataset
from pliant.devices import Fleet
from pliant.engine.evaluation import PersonalScore, measure_accuracy
from pliant.engine.ledger import RoundRecord, TaskRecord, sum_tasks
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import sample_dropout_times
from pliant.engine.run_store import RunState, RunStore
from pliant.engine.split_virtual import MessageHook, VirtualEnvironment
from pliant.methods.base import ServerState
from pliant.params import Params, digest
from pliant.split.base import SplitEnvironment, SplitTraining
from pliant.split.server import MaskedServer
from pliant.split.session import ClientFactory, Session
from pliant.workers.pool import use_one_thread


class SplitMethod(Protocol):
    """A split method, as the engine uses it."""

    @property
    def cut(self) -> str: ...

    @property
    def local(self) -> SplitTraining: ...

    @property
    def has_head(self) -> bool: ...

    @property
    def threshold(self) -> float: ...

    def begin(self, session: Session) -> None:
        """Assign the parts of the clients and the server."""

    def train(
        self, session: Session, environment: SplitEnvironment, number: int, rounds: int
    ) -> None:
        """Train for one round."""


def simulate_split(
    method: SplitMethod,
    net: nn.Module,
    data: FederatedData,
    fleet: Fleet,
    *,
    settings: RunSettings | None = None,
    server_speed: float | None = None,
    folder: Path | None = None,
    is_dry: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
    message_hook: MessageHook | None = None,
) -> Iterator[RoundRecord]:
    """Train a network split between clients and a server; yield a record of each round.

    Every device of the data is a client in each round in which it is available. `server_speed` is
    the server's MAC/s; without it, server time is free. A dry run charges every mini-batch with
    dense activations but computes nothing. `message_hook` may alter clients' messages in transit,
    to test validation. `folder` and `is_stopped` are as in `simulate`.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.ImageDataset.from_tensors(torch.rand(24, 3, 32, 32), torch.arange(24) % 10)
    >>> data = pl.data.TrainTestData(images, images).share(pl.Iid(), devices=2, proxy=8)
    >>> method, net = pl.AdaSplit(kappa=0.0), pl.models.lenet_small(classes=10)
    >>> fleet, settings = pl.Fleet(size=2), pl.RunSettings(rounds=1)
    >>> [record] = pl.simulate_split(method, net, data, fleet, settings=settings)
    >>> record.tasks, record.up > record.down
    (2, True)
    """
    settings = settings or RunSettings()
    session = build_session(method, net, data, fleet, settings.seed, is_dry=is_dry)

    def make_environment(round_number: int, start: float) -> VirtualEnvironment:
        return build_virtual_environment(
            session, fleet, settings, round_number, start, server_speed, message_hook=message_hook
        )

    return run_split(
        method, session, settings, make_environment, folder=folder, is_stopped=is_stopped
    )


def build_session(
    method: SplitMethod,
    net: nn.Module,
    data: FederatedData,
    fleet: Fleet,
    seed: int,
    *,
    is_dry: bool = False,
    make_client: ClientFactory | None = None,
    only_client: int | None = None,
) -> Session:
    """Split a network into the parts of the clients and the server."""
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
        make_client=make_client,
        only_client=only_client,
    )
    method.begin(session)
    return session


def run_split(
    method: SplitMethod,
    session: Session,
    settings: RunSettings,
    make_environment: Callable[[int, float], "RoundEnvironment"],
    *,
    folder: Path | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RoundRecord]:
    """Train round by round, wherever the clients are, and yield a record of each round.

    `make_environment` builds the environment of a round from its number and start time.
    """
    with use_one_thread():
        yield from _run_rounds(method, session, settings, make_environment, folder, is_stopped)


def _run_rounds(
    method: SplitMethod,
    session: Session,
    settings: RunSettings,
    make_environment: Callable[[int, float], "RoundEnvironment"],
    folder: Path | None,
    is_stopped: Callable[[], bool],
) -> Iterator[RoundRecord]:
    store = RunStore(folder) if folder is not None else None
    try:
        run_state = store.resume() if store else None
        first_round, now = 0, 0.0
        if run_state is not None:
            first_round, now = run_state.next_round, run_state.seconds
            _restore(session, run_state)
        for number in range(first_round, settings.rounds):
            environment = make_environment(number, now)
            method.train(session, environment, number, settings.rounds)
            records = environment.build_records(number)
            now += environment.elapsed_seconds()
            total = sum_tasks(number, now, records)
            is_last = number + 1 == settings.rounds
            is_over = is_last or is_stopped()
            if not session.is_dry and (is_last or (number + 1) % settings.evaluation.every == 0):
                personal = _evaluate_clients(session, method, settings)
                total = msgspec.structs.replace(total, personal=personal)
            if is_last:
                total = msgspec.structs.replace(total, digest=digest(_collect_state(session)))
            if store:
                store.append([*records, total])
                if is_over or (number + 1) % settings.checkpoint_every == 0:
                    store.save(_make_run_state(session, number + 1, now, is_last=is_last))
            yield total
            if is_over:
                return
    finally:
        if store:
            store.close()


class RoundEnvironment(SplitEnvironment, Protocol):
    """The environment of one round, with its costs."""

    def build_records(self, round_number: int) -> list[TaskRecord]:
        """Return what each participant cost and how it ended."""

    def elapsed_seconds(self) -> float:
        """Return the length of the round."""


def build_virtual_environment(
    session: Session,
    fleet: Fleet,
    settings: RunSettings,
    round_number: int,
    start: float,
    server_speed: float | None,
    *,
    message_hook: MessageHook | None = None,
    has_left: Callable[[int], bool] | None = None,
) -> VirtualEnvironment:
    """Build the environment of a round in virtual time."""
    clients = np.arange(len(session.data))
    return VirtualEnvironment(
        fleet,
        session.samples_per_round * session.device_training_macs,
        seed=settings.seed,
        start=start,
        dropout_times=sample_dropout_times(
            settings.rules,
            clients,
            seed=settings.seed,
            round=round_number,
            round_seconds=fleet.round_seconds,
        ),
        server_speed=server_speed,
        classes=session.data.train.classes,
        client_classes=session.client_classes,
        max_abs=settings.guard.largest,
        message_hook=message_hook or (lambda client, message: message),
        has_left=has_left or (lambda client: False),
    )


def _evaluate_clients(
    session: Session, method: SplitMethod, settings: RunSettings
) -> PersonalScore:
    """Score each client's full network on its own test images."""

    def measure_accuracies(get_server_params: Callable[[int], Params]) -> tuple[float, ...]:
        return tuple(
            measure_accuracy(
                session.net,
                session.assemble_params(client, get_server_params(client)),
                session.data,
                client,
                settings.evaluation,
            )
            for client in range(len(session.data))
        )

    server = session.active_server
    thresholded: tuple[float, ...] = ()
    if method.threshold and isinstance(server, MaskedServer):
        effective_params = server.effective_params  # bound here: mypy forgets the type in a lambda
        thresholded = measure_accuracies(lambda client: effective_params(client, method.threshold))
    return PersonalScore(measure_accuracies(server.effective_params), thresholded=thresholded)


# On disk, the server's part is stored as the parameters, the method's state as extra, and each
# client's part as a device's state.


def _make_run_state(
    session: Session, next_round: int, seconds: float, *, is_last: bool
) -> RunState:
    server = session.active_server.state_dict()
    clients = {client: part.state_dict() for client, part in session.clients.items()}
    if is_last:  # never resumed, and optimiser state would be two thirds of the file
        server = _select_weights(server)
        clients = {client: _select_weights(state) for client, state in clients.items()}
    return RunState(next_round, seconds, ServerState(server, dict(session.method_state)), clients)


def _select_weights(state: Params) -> Params:
    return {name: tensor for name, tensor in state.items() if "params/" in name}


def _restore(session: Session, run_state: RunState) -> None:
    if "time" not in run_state.device_states.get(0, {"time": 0}):
        return  # a finished run, saved without optimiser state
    session.active_server.load_state_dict(run_state.server_state.params)
    session.method_state.update(run_state.server_state.extra)
    for client, state in run_state.device_states.items():
        session.clients[client].load_state_dict(state)


def _collect_state(session: Session) -> Params:
    server = session.active_server.state_dict()
    tensors = {f"server/{name}": tensor for name, tensor in server.items()}
    for client, part in session.clients.items():
        tensors |= {f"client{client}/{name}": tensor for name, tensor in part.state_dict().items()}
    return tensors


def estimate_split_cost(
    method: SplitMethod,
    net: nn.Module,
    shape: tuple[int, int, int],
    *,
    clients: int,
    samples: int,
    classes: int,
    rounds: int,
) -> list[RoundRecord]:
    """Estimate the cost of a run with `samples` images of this shape on each client.

    Activations are charged as dense.

    >>> import pliant as pl
    >>> net, method = pl.models.lenet_small(), pl.AdaSplit(kappa=0.5)
    >>> size = {"clients": 2, "samples": 32, "classes": 10, "rounds": 2}
    >>> [record.up > 0 for record in pl.estimate_split_cost(method, net, (3, 32, 32), **size)]
    [False, True]
    """
    total = clients * samples
    pixels = torch.zeros((1, *shape), dtype=torch.uint8).expand(total, *shape)  # takes no memory
    labels = torch.zeros(total, dtype=torch.int64)
    mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    images = ImageDataset(pixels, labels, classes, mean, std, name="blank")
    shares = tuple(np.split(np.arange(total), clients))
    data = FederatedData(images, images, images, shares, np.zeros(0, np.int64))
    settings = RunSettings(rounds=rounds)
    fleet = Fleet(size=clients)
    return list(simulate_split(method, net, data, fleet, settings=settings, is_dry=True))
