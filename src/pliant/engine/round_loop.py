"""Rounds, written once: select, dispatch, collect, merge, evaluate, save.

A `Transport` says how tasks reach devices and come back as valid updates: through simulated
workers, or over a network.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import torch

from pliant.compression import AnyCompression, Uncompressed
from pliant.devices import Fleet
from pliant.engine.device_scores import DeviceScores
from pliant.engine.evaluation import Evaluation, evaluate, evaluate_per_device
from pliant.engine.ledger import RoundRecord, TaskRecord, sum_tasks
from pliant.engine.local_work import EXTRA_PREFIX
from pliant.engine.manifests import ManifestBuilder
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import RunState, RunStore
from pliant.engine.selection import Selection, extend_history
from pliant.engine.worker_context import WorkerContext
from pliant.methods.aggregation import CoverageState, UpdateStream, build_trained_subnet
from pliant.methods.base import Update
from pliant.methods.privacy import (
    DevicePrivacy,
    Release,
    add_release,
    compute_epsilon,
    merge_privately,
)
from pliant.methods.validation import ValidationPolicy
from pliant.methods.verbs import DependsOnFleet, HasServerCost, Personalises, TrainsOwnPart
from pliant.nn.elastic import Elastic
from pliant.nn.growth import silence_filters
from pliant.nn.optimisers import MomentumFactor
from pliant.params import Params, digest, update_average
from pliant.rng import rng_stream
from pliant.table_search.step_time import StepTimeModel
from pliant.value import Count, Positive, Rounds, Value

MAX_EMPTY_ROUNDS = 3  # in a row, before a warning
TIME_TOLERANCE = 1e-9  # relative, as the lengths of rounds are added up

log = logging.getLogger("pliant")


class RunSettings(Value, frozen=True):
    """How to run rounds, whatever the method.

    >>> import pliant as pl
    >>> pl.RunSettings(rounds=20, per_round=5, rules=pl.RoundRules(late="partial")).rules.late
    'partial'
    """

    rounds: Rounds = 100
    seconds: Positive | None = None  # virtual, at which a simulation ends instead of by its rounds
    per_round: Count = 10  # devices; a smaller fleet takes part as a whole
    seed: int = 0
    select: Selection = "uniform"
    rules: RoundRules = RoundRules()
    evaluation: Evaluation = Evaluation()
    checkpoint_every: Count = 10  # rounds
    guard: ValidationPolicy = ValidationPolicy()
    compression: AnyCompression = Uncompressed()  # of the devices' updates
    step_records: bool = True  # the time and row of every mini-batch, in the record of its task
    privacy: DevicePrivacy | None = None  # of every device, against those who see the network
    ema_decay: MomentumFactor = 0.0  # above 0, a mean over the rounds is tested and kept
    step_time: StepTimeModel | None = None  # whose ratios virtual time follows; None: MACs


@dataclass
class Run:
    """A run in progress: everything that its rounds share."""

    context: WorkerContext
    fleet: Fleet
    settings: RunSettings
    state: RunState
    repeats_empty_rounds: bool = False
    repeated_rounds: int = 0
    now: float | None = None  # seconds; None: at the start of the next round
    test_on_devices: Callable[["Run"], DeviceScores | None] | None = None
    secret_seed: int | None = None  # of privacy; None: the settings' seed, which devices know

    def __post_init__(self) -> None:
        method = self.context.method
        if isinstance(method, DependsOnFleet):
            self.context = replace(self.context, method=method.fit_fleet(self.fleet.size))
        self.manifests = ManifestBuilder(self.context)

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, repeated ones included."""
        return self.settings.rounds + self.repeated_rounds

    @property
    def target_updates(self) -> int:
        """Return how many updates a round should get: at most one from each device."""
        return min(self.settings.per_round, self.fleet.size)

    @property
    def lr(self) -> float:
        """Return the learning rate of the next round."""
        local, number = self.context.method.local, self.state.next_round - self.repeated_rounds
        if self.settings.seconds is not None:
            return local.schedule.lr_at(local.optimiser.lr, self.progress, 1)
        return local.schedule.lr_at(local.optimiser.lr, number, self.settings.rounds)

    def compute_lr(self, device: int) -> float:
        """Return the learning rate of a device's next task."""
        return self.lr * self.context.scale_lr(self.state.server_state, device)

    @property
    def progress(self) -> float:
        """Return how much of the run is done: 0 before the first round, 1 after the last."""
        if self.settings.seconds is not None:
            now = self.state.seconds if self.now is None else self.now
            return min(1.0, now / self.settings.seconds)
        return (self.state.next_round - self.repeated_rounds) / self.settings.rounds

    @property
    def last_row(self) -> int | None:
        """Return the last row that devices may choose in the next round; None: any."""
        return self.context.limit_row(self.state.server_state, self.progress)

    @property
    def drawing_seed(self) -> int:
        """Return the seed by which devices are drawn, and the noise of privacy."""
        return self.settings.seed if self.secret_seed is None else self.secret_seed

    def merge(self, updates: Sequence[Update] | UpdateStream) -> Any:
        """Return the server's state after the updates of the next round."""
        state, context, privacy = self.state.server_state, self.context, self.settings.privacy
        if privacy is None:
            return context.merge(state, updates)
        rng = rng_stream(self.drawing_seed, "privacy", self.state.next_round)
        return merge_privately(
            privacy, context.net, state, updates, context.merge, target=self.target_updates, rng=rng
        )

    def ends_with(self, number: int, seconds: float) -> bool:
        """Return whether a round that closes at this time is the last one."""
        if self.settings.seconds is None:
            return number + 1 >= self.num_rounds
        return seconds >= (1 - TIME_TOLERANCE) * self.settings.seconds

    @property
    def sent_params(self) -> Params:
        """Return the network that devices are sent; empty if they have networks of their own."""
        return self.state.server_state.params if self.context.predictor is None else {}

    @property
    def shared_params(self) -> Params:
        """Return what every device is sent: the network and, prefixed, the method's broadcast."""
        broadcast = self.context.broadcast(self.state.server_state)
        extra = {f"{EXTRA_PREFIX}{name}": tensor for name, tensor in broadcast.items()}
        return {**self.sent_params, **extra}


@dataclass(frozen=True)
class RoundResult:
    """A closed round, before or after its updates are merged."""

    updates: list[Update]  # valid and in time, in device order
    tasks: list[TaskRecord]  # one for each task
    closed_at: float  # seconds of the run
    device_states: dict[int, Any] = field(default_factory=dict)  # new, of merged devices
    dispatched_at: float | None = None  # seconds of the run, if devices were waited for
    residuals: dict[int, Params] = field(default_factory=dict)  # new, of merged devices
    server_state: Any = None  # if the updates, which then have no tensors, are merged already
    population: int | None = None  # devices among which these were drawn; None: the fleet


class Transport(Protocol):
    """How a round's tasks reach devices, and how their updates come back."""

    def select(self, run: Run) -> list[int]:
        """Return the devices of the next round."""

    def dispatch(self, run: Run, devices: list[int]) -> None:
        """Give each device its task."""

    def collect(self, run: Run) -> RoundResult:
        """Wait until the round closes, validate the updates and record the tasks."""


def run_rounds(
    run: Run,
    transport: Transport,
    store: RunStore | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RoundRecord]:
    """Run rounds until the last one and yield their records."""
    is_over, empty_rounds = run.ends_with(run.state.next_round - 1, run.state.seconds), 0
    while not is_over:
        transport.dispatch(run, transport.select(run))
        result = transport.collect(run)
        record = finish_round(run, result)
        empty_rounds = 0 if record.merged else empty_rounds + 1
        if empty_rounds == MAX_EMPTY_ROUNDS:
            _warn_of_empty_rounds(record, result.tasks)
        is_over = record.digest is not None or is_stopped()
        if store is not None:
            store.append([*result.tasks, record])
            if is_over or run.state.next_round % run.settings.checkpoint_every == 0:
                store.save(run.state)
        yield record


def _warn_of_empty_rounds(record: RoundRecord, tasks: list[TaskRecord]) -> None:
    """Log that training stands still, and how the tasks of the last round ended."""
    reasons = [f"{count} {outcome}" for outcome, count in record.outcomes.items()]
    reasons += [task.outcome for task in tasks if ": " in task.outcome][:1]
    first, last = record.round + 2 - MAX_EMPTY_ROUNDS, record.round + 1
    how = ", ".join(reasons) or "no device was selected"
    log.warning("no update was merged in rounds %d to %d: in the last, %s", first, last, how)


def finish_round(run: Run, result: RoundResult) -> RoundRecord:
    """Merge the updates of a round, move the run to the next round, and evaluate the network."""
    number, start = run.state.next_round, run.state.seconds
    old_params = run.state.server_state.params
    context = run.context
    last_row = run.last_row
    side = None if last_row is None else context.scale_inputs(last_row).side
    server_state = result.server_state
    if server_state is None:
        server_state = run.merge(result.updates)
    if context.distiller is not None and result.updates:
        rng = rng_stream(run.settings.seed, "distil", number)
        params = context.distiller.distil(
            context.net, old_params, server_state.params, result.updates, context.data.proxy, rng
        )
        server_state = replace(server_state, params=params)
    server_macs = _count_server_macs(context, result.updates)
    part = context.net
    if context.part_trainer is not None:
        part = context.part_trainer.select_trained(context.net, server_state, last_row)
    device_states = run.state.device_states | result.device_states
    residuals = run.state.residuals | result.residuals
    history = run.state.history
    if not isinstance(run.settings.select, str):  # "uniform" and "available" need none
        history = extend_history(history, result.tasks)
    run.state = replace(
        run.state,
        next_round=number + 1,
        seconds=result.closed_at,
        server_state=server_state,
        device_states=device_states,
        history=history,
        residuals=residuals,
        releases=_list_releases(run, result),
        average=_update_average(run, server_state, result),
    )
    record = sum_tasks(number, result.closed_at, result.tasks)
    epsilon = _compute_epsilon(run)
    record = msgspec.structs.replace(
        record,
        dispatched_at=result.dispatched_at,
        side=side,
        epsilon=epsilon,
        server_macs=server_macs,
    )
    run.repeated_rounds += run.repeats_empty_rounds and not result.updates
    is_last = run.ends_with(number, result.closed_at)
    if is_last or run.settings.evaluation.is_due(number, start, result.closed_at):
        record = _add_scores(run, record, old_params, result.updates, part)
    if is_last:
        record = msgspec.structs.replace(record, digest=digest(run.state.trained_params))
    return record


def _count_server_macs(context: WorkerContext, updates: list[Update]) -> float:
    """Return the MACs that the server spends on a round beyond merging its updates."""
    if not updates or not isinstance(context.method, HasServerCost):
        return 0.0
    return context.method.server_macs(context.net, updates, len(context.data.proxy))


def _update_average(run: Run, server_state: Any, result: RoundResult) -> Params:
    """Return the average of the network over the rounds, after this one."""
    state, decay = run.state, run.settings.ema_decay
    if not decay or not result.updates:
        return state.average
    return update_average(state.average, server_state.params, decay, state.next_round)


def _list_releases(run: Run, result: RoundResult) -> tuple[Release, ...]:
    """Return the rounds that count for privacy: those that merged something."""
    releases = run.state.releases
    if run.settings.privacy is None or not result.updates:
        return releases
    return add_release(releases, result.population or run.fleet.size, len(result.tasks))


def _compute_epsilon(run: Run) -> float | None:
    """Return epsilon so far, as far as it is finite; None if nobody asked for privacy."""
    privacy, releases = run.settings.privacy, run.state.releases
    epsilon = math.inf if privacy is None else compute_epsilon(privacy, releases)
    return epsilon if math.isfinite(epsilon) else None


def _add_scores(
    run: Run, record: RoundRecord, old_params: Params, updates: list[Update], part: Elastic
) -> RoundRecord:
    """Score the network: per device if devices have their own test images, else overall.

    `part` of it has been trained; devices with their own tests use that part, without the filters
    that nobody has trained, at the size of the images that are trained.
    """
    if run.test_on_devices is not None:
        record = msgspec.structs.replace(record, on_devices=run.test_on_devices(run))
    if not len(run.context.data.test):
        return record
    net, data, how = run.context.net, run.context.data, run.settings.evaluation
    params = run.state.trained_params
    trained_params = _zero_untrained_filters(run.context, run.state.server_state, params)
    if not data.test_shares:
        score, trained_score = evaluate(net.module, params, data, how), None
        if trained_params is not None or record.side is not None or part is not net:
            trained_score = evaluate(part.module, trained_params or params, data, how, record.side)
        return msgspec.structs.replace(record, score=score, trained_score=trained_score)
    local_params = _list_personal_params(run, old_params, updates)
    method, own_nets = run.context.method, {}
    if isinstance(method, TrainsOwnPart):
        own_nets = {update.device: method.select_own(net, update).module for update in updates}
    personal = evaluate_per_device(
        part.module, trained_params or params, local_params, data, how, record.side, own_nets
    )
    if run.context.predictor is not None:  # no other network is trained
        scores = zip(personal.per_device, personal.after_training, strict=True)
        own = tuple(first if trained is None else trained for first, trained in scores)
        personal = msgspec.structs.replace(personal, per_device=own)
    return msgspec.structs.replace(record, personal=personal)


def _list_personal_params(run: Run, old_params: Params, updates: list[Update]) -> dict[int, Params]:
    """Return the network that each device would use: its own, or the one it has just trained."""
    method, state = run.context.method, run.state
    if isinstance(method, Personalises):
        params = state.server_state.params
        return {
            device: method.personalise(params, device_state)
            for device, device_state in state.device_states.items()
        }
    return {
        update.device: {
            name: (update.base or old_params)[name] + delta for name, delta in update.delta.items()
        }
        for update in updates
        if update.subnet is None
    }


def _zero_untrained_filters(context: WorkerContext, state: Any, params: Params) -> Params | None:
    """Return the network without the filters that no device has trained yet, if there are any."""
    is_known = isinstance(state, CoverageState)
    subnet = build_trained_subnet(context.net, state) if is_known else None
    if subnet is None:
        return None
    silenced = silence_filters(context.net, params, subnet)
    is_same = all(torch.equal(silenced[name], tensor) for name, tensor in params.items())
    return None if is_same else silenced
