"""Simulate split learning in virtual time, with the same fleet and records as federated runs."""

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from torch import nn

from pliant.compression import Uncompressed
from pliant.data import FederatedData
from pliant.data.declared import DeclaredData
from pliant.devices import Fleet
from pliant.engine.evaluation import Evaluation, PersonalScore, measure_accuracy
from pliant.engine.ledger import RoundRecord, TaskRecord, sum_tasks
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_inputs import check_inputs, describe_inputs
from pliant.engine.run_store import RunState, RunStore
from pliant.engine.selection import select_devices
from pliant.engine.split_virtual import VirtualEnvironment
from pliant.engine.worker_context import InputFactory
from pliant.params import Params, clone, digest, nbytes
from pliant.split.base import ChargedEnvironment
from pliant.split.control import count_test_bytes
from pliant.split.deferred import DeferredWork
from pliant.split.exchange import SplitRound
from pliant.split.session import CUTS_STATE, ClientFactory, Session, SplitSetup
from pliant.workers.pool import AnyWorkers, InlineWorkers, use_one_thread

T = TypeVar("T")
# Returns a client's accuracy, given the parameters of the server's part; None if it is not known.
ClientTest = Callable[[int, Params], float | None]
REJECTED = "rejected"  # begins the outcome of a client that was rejected
FIXED_ROUNDS = "split learning keeps no optimiser state after its last round"


class SplitMethod(SplitSetup, Protocol):
    """A split method, as the engine uses it."""

    @property
    def threshold(self) -> float: ...

    def train(self, split_round: SplitRound) -> None:
        """Train for one round."""


def simulate_split(
    method: SplitMethod,
    net: nn.Module,
    data: FederatedData,
    fleet: Fleet,
    *,
    settings: RunSettings | None = None,
    server_speed: float | None = None,
    folder: str | Path | None = None,
    is_dry: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
    make_client: ClientFactory | None = None,
    workers: AnyWorkers | None = None,
    make_inputs: InputFactory | None = None,
) -> Iterator[RoundRecord]:
    """Train a network split between clients and a server; yield a record of each round.

    Every device of the data is a client; `per_round` and `select` of the settings choose who takes
    part in a round, which lasts until all of them are done (`late="wait"`). `server_speed` is the
    server's MAC/s; without it, server time is free. A dry run charges every mini-batch with
    dense activations but computes nothing. `make_client` may replace clients, for example by faulty
    ones. `workers` train the others on their local losses; all else runs in this process. `folder`,
    `is_stopped` and `make_inputs` are as in `simulate`.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.ImageDataset.from_tensors(torch.rand(24, 3, 32, 32), torch.arange(24) % 10)
    >>> data = pl.data.TrainTestData(images, images).share(pl.Iid(), devices=2, proxy=8)
    >>> method, net = pl.AdaSplit(kappa=0.0), pl.models.lenet_small(classes=10)
    >>> fleet = pl.Fleet(size=2)
    >>> settings = pl.RunSettings(rounds=1, rules=pl.RoundRules(late="wait"))
    >>> [record] = pl.simulate_split(method, net, data, fleet, settings=settings)
    >>> record.tasks, record.up > record.down
    (2, True)
    """
    settings = settings or RunSettings(rules=RoundRules(late="wait"))
    check_split_rules(settings, fleet, len(data))
    _check_no_quorum(settings)
    check_simulated_deadline(settings.rules)
    workers, deferred = workers or InlineWorkers(), None
    if not (is_dry or make_client or isinstance(workers, InlineWorkers)):
        make_own = make_inputs or partial(_return, (net, data))
        setup = partial(_build_worker_session, method, make_own, fleet, settings.seed)
        deferred = DeferredWork(workers, setup)
        make_client = deferred.wrap
    session = Session(
        method, net, data, fleet, settings.seed, is_dry=is_dry, make_client=make_client
    )

    def make_environment(number: int, start: float, clients: list[int]) -> VirtualEnvironment:
        macs = session.round_macs
        return VirtualEnvironment(
            fleet, macs, settings, number, start, selected=clients, server_speed=server_speed
        )

    inputs = None
    if folder is not None:
        network = f"{session.device_net.fingerprint} {session.server_net.fingerprint}"
        inputs = describe_inputs(method, network, data, fleet, settings)
        inputs["server_speed"] = server_speed
    rounds = run_split(
        method,
        session,
        settings,
        make_environment,
        folder=None if folder is None else Path(folder),
        inputs=inputs,
        is_stopped=is_stopped,
    )
    return rounds if deferred is None else _close_after(rounds, deferred)


def _build_worker_session(
    method: SplitMethod, make_inputs: InputFactory, fleet: Fleet, seed: int
) -> Session:
    return Session(method, *make_inputs(), fleet, seed, check=False)  # by the main process


def _return(value: T) -> T:
    return value


def _close_after(rounds: Iterator[RoundRecord], deferred: DeferredWork) -> Iterator[RoundRecord]:
    with closing(deferred):
        yield from rounds


def _check_no_quorum(settings: RunSettings) -> None:
    if settings.rules.quorum:
        raise ValueError(
            "Expected rules.quorum = 0: a simulated split round trains with whoever is available, "
            f"got {settings.rules.quorum}"
        )


def check_simulated_deadline(rules: RoundRules) -> None:
    """Refuse a deadline, which only rounds on real devices have."""
    if rules.late != "wait":
        raise ValueError(
            'Expected rules.late = "wait" for a split method, whose simulated rounds have no '
            f"deadline, got {rules.late!r}"
        )


def run_split(
    method: SplitMethod,
    session: Session,
    settings: RunSettings,
    make_environment: Callable[[int, float, list[int]], "RoundEnvironment"],
    *,
    folder: Path | None = None,
    inputs: dict[str, Any] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    test_client: ClientTest | None = None,
) -> Iterator[RoundRecord]:
    """Train round by round, wherever the clients are, and yield a record of each round.

    `make_environment` builds the environment of a round from its number, start time and selected
    clients; with `inputs`, a folder in which a run had others is refused. `test_client` lets a
    client test its network itself, on images that are not here.
    """
    # a server's state may have activations and labels
    opened = None if folder is None else closing(RunStore(folder, is_private=True))
    with use_one_thread(), opened or nullcontext() as store:
        if folder is not None and inputs is not None:
            check_inputs(folder, inputs, rounds_dependency=FIXED_ROUNDS)
        run_state = store.resume(SplitState, SplitClientState) if store else None
        first_round, now = 0, 0.0
        if run_state is not None:
            first_round, now = run_state.next_round, run_state.seconds
            if first_round < settings.rounds:  # else it was saved without optimiser state
                _restore(session, run_state)
        for number in range(first_round, settings.rounds):
            selected = select_clients(session, settings, number, now)
            environment = make_environment(number, now, selected)
            records = _train_round(method, session, settings, environment, number, selected)
            now += environment.seconds_elapsed()
            is_last = number + 1 == settings.rounds
            is_over = is_last or is_stopped()
            personal = final_digest = new_state = None
            if is_last or (number + 1) % settings.evaluation.every == 0:
                personal = _evaluate_clients(session, method, settings.evaluation, test_client)
            if personal is not None:
                sent = environment.charge_tests(_count_test_bytes(session, personal))
                personal = msgspec.structs.replace(personal, sent=sent)
            if is_last:
                final_digest = _compute_digest(session)
            if store and (is_over or (number + 1) % settings.checkpoint_every == 0):
                new_state = _make_run_state(session, number + 1, now, is_last=is_last)
            records = environment.charge_control(records)  # evaluation and checkpoints included
            total = msgspec.structs.replace(
                sum_tasks(number, now, records), personal=personal, digest=final_digest
            )
            if store:
                store.append([*records, total])
                if new_state is not None:
                    store.save(new_state)
            yield total
            if is_over:
                return


def _train_round(
    method: SplitMethod,
    session: Session,
    settings: RunSettings,
    environment: "RoundEnvironment",
    number: int,
    clients: list[int],
) -> list[TaskRecord]:
    """Train one round; undo what the server has learnt from rejected clients."""
    split_round = SplitRound(
        session,
        environment,
        number,
        settings.rounds,
        max_abs=settings.guard.largest,
        clients=clients,
    )
    if len(session.sides) > 1:
        assert isinstance(environment, VirtualEnvironment)  # others are refused
        split_round.slide_cuts(environment.estimate_seconds)
    start = clone(session.server.state_dict()), dict(session.method_state)
    method.train(split_round)
    records = environment.build_records(number)
    rejected = [r.device for r in records if r.outcome.startswith(REJECTED)]
    if records and len(rejected) == len(records):
        session.server.load_state_dict(start[0])  # it was trained on their messages only
        session.method_state = start[1]
    else:
        split_round.retrain_server(start[0], rejected)
    return records


def check_split_rules(settings: RunSettings, fleet: Fleet, clients: int) -> None:
    """Refuse rules that split rounds do not follow: each mini-batch counts once it is trained."""
    rules = settings.rules
    limited = [device_class for device_class in fleet.classes if device_class.memory is not None]
    if limited:
        raise ValueError(
            "Expected no `memory` in the fleet's classes: split methods do not model it, "
            f"got {limited[0].memory:g} bytes for {limited[0].name!r}"
        )
    if rules.late == "discard":
        raise ValueError(
            'Expected rules.late = "wait" for a split method, or "partial" on real devices, '
            f"got {rules.late!r}"
        )
    if settings.seconds is not None or settings.evaluation.every_seconds is not None:
        raise ValueError(
            "Expected neither `seconds` nor `evaluation.every_seconds` for a split method, which "
            "counts rounds"
        )
    if not isinstance(settings.select, str):
        kind = type(settings.select).__name__
        raise ValueError(
            f'Expected select = "uniform" or "available" for a split method, got {kind}'
        )
    if settings.privacy is not None:
        raise ValueError("Expected no `privacy` for a split method: it needs noise on activations")
    if settings.step_time is not None:
        raise ValueError("Expected no `step_time` for a split method, whose time follows its MACs")
    if settings.ema_decay:
        raise ValueError("Expected no `ema_decay` for a split method, whose parts are not averaged")
    if settings.compression != Uncompressed():
        raise ValueError("Expected no `compression`: split methods encode activations by `payload`")
    if rules.over_selection and settings.per_round < clients:
        raise ValueError(
            "Expected rules.over_selection = 0 for a split method, in which all selected clients "
            f"are trained, got {rules.over_selection}"
        )


def select_clients(session: Session, settings: RunSettings, round: int, now: float) -> list[int]:
    """Return the clients of a round, drawn as a federated run of as many devices draws them."""
    seed = settings.seed
    selected: list[int] = select_devices(
        len(session.data),
        settings.per_round,
        settings.select,
        seed=seed,
        round=round,
        speeds=lambda clients: session.fleet.speeds_at(clients, now, seed=seed),
        history={},
    ).tolist()
    return selected


class RoundEnvironment(ChargedEnvironment, Protocol):
    """The environment of one round, with the cost and outcome of each participant."""

    def build_records(self, round_number: int) -> list[TaskRecord]: ...

    def seconds_elapsed(self) -> float: ...

    def charge_control(self, records: list[TaskRecord]) -> list[TaskRecord]:
        """Add what was sent besides the exchanges to the records of a round."""

    def charge_tests(self, formula_bytes: int) -> int:
        """Return the bytes of the tests on devices, by formula or as counted."""


def _evaluate_clients(
    session: Session,
    method: SplitMethod,
    evaluation: Evaluation,
    test_client: ClientTest | None,
) -> PersonalScore | None:
    """Score each client's full network on its own test images; None if there are none."""
    if session.is_dry or (test_client is None and not len(session.data.test)):
        return None

    def measure(threshold: float, client: int) -> float | None:
        server_params = session.server.effective_params(client, threshold)
        if test_client is not None:
            return test_client(client, server_params)
        params = session.assemble_params(client, server_params)
        return measure_accuracy(session.net, params, session.data, client, evaluation)

    clients, threshold = range(len(session.data)), method.threshold
    accuracies = tuple(measure(0.0, client) for client in clients)
    if all(accuracy is None for accuracy in accuracies):
        return None
    return PersonalScore(
        accuracies,
        thresholded=tuple(measure(threshold, client) for client in clients if threshold),
    )


def _count_test_bytes(session: Session, personal: PersonalScore) -> int:
    """Return the bytes of the tests if clients keep their parts, and so must test themselves."""
    if session.shares_parts:
        return 0
    params = session.server.effective_params(0)
    tests = [*personal.per_device, *personal.thresholded]
    count = sum(accuracy is not None for accuracy in tests)
    return count * count_test_bytes(nbytes(params), len(params))


def _compute_digest(session: Session) -> str:
    """Return the SHA-256 of the digests of all parts, which need not be here."""
    checksum = sha256(digest(session.server.state_dict()).encode())
    for client in sorted(session.clients):
        checksum.update(f" {client} {session.clients[client].digest()}".encode())
    return checksum.hexdigest()


@dataclass(frozen=True)
class SplitClientState:
    """A client's part, optimiser state included."""

    part: Params


@dataclass(frozen=True)
class SplitState:
    """The server's part, optimiser state included, and the method's own state."""

    params: Params
    method_state: dict[str, Params] = field(default_factory=dict)


def _make_run_state(
    session: Session, next_round: int, seconds: float, *, is_last: bool
) -> RunState:
    def select(state: Params) -> Params:
        # a finished run is never resumed, and optimiser state would be two thirds of the file
        is_kept = ("params/", "kept/")  # of a part on a device, only a digest is here
        return {n: t for n, t in state.items() if not is_last or any(k in n for k in is_kept)}

    server = SplitState(select(session.server.state_dict()), dict(session.method_state))
    clients = {
        client: SplitClientState(select(part.state_dict()))
        for client, part in session.clients.items()
    }
    data = session.data
    declarations = data.declarations if isinstance(data, DeclaredData) else {}
    return RunState(next_round, seconds, server, clients, declarations=declarations)


def _restore(session: Session, run_state: RunState) -> None:
    session.method_state.update(run_state.server_state.method_state)
    for number, cut in session.method_state.get(CUTS_STATE, {}).items():
        session.move_cut(int(number), int(cut))
    session.server.load_state_dict(run_state.server_state.params)
    if isinstance(session.data, DeclaredData):
        session.data.declarations.update(run_state.declarations)
    for client, state in run_state.device_states.items():
        session.clients[client].load_state_dict(state.part)
