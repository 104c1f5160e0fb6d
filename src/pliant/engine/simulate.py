"""Simulate federated training in virtual time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from torch import nn

from pliant.data import FederatedData
from pliant.devices import FULL_NETWORK, FixedChoice, Fleet, RowChoice, compute_joules
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.evaluation import Evaluation, Score, evaluate, evaluate_per_device
from pliant.engine.event_queue import EventQueue
from pliant.engine.ledger import RoundRecord, TaskRecord, sum_tasks
from pliant.engine.local_work import (
    EXTRA_PREFIX,
    Job,
    WorkerInputFactory,
    build_context,
    make_example_input,
    make_local_work,
    run_job,
)
from pliant.engine.manifests import ManifestBuilder
from pliant.engine.round_rules import RoundRules, TaskOutcome
from pliant.engine.run_store import RunState, RunStore
from pliant.engine.selection import Selection, select_devices
from pliant.engine.timetable import RoundTasks, Timetable, build_timetable, compute_start_status
from pliant.methods.base import (
    HasExtraUpload,
    HasStepCost,
    Method,
    ServerState,
    TaskKey,
    TracksCoverage,
    Update,
)
from pliant.methods.validation import ValidationPolicy, accept_valid
from pliant.nn.elastic import Elastic, elastic
from pliant.params import Params, digest, get_params, nbytes
from pliant.value import Count, Value
from pliant.workers.pool import AnyWorkers, InlineWorkers, Pool, open_pool


class RunSettings(Value, frozen=True):
    """How to run rounds, whatever the method.

    >>> import pliant as pl
    >>> pl.RunSettings(rounds=20, per_round=5, rules=pl.RoundRules(late="partial")).rules.late
    'partial'
    """

    rounds: Count = 100
    per_round: Count = 10
    seed: int = 0
    select: Selection = "uniform"
    rules: RoundRules = RoundRules()
    evaluation: Evaluation = Evaluation()
    checkpoint_every: Count = 10  # rounds
    guard: ValidationPolicy = ValidationPolicy()


@dataclass
class _Run:
    """A run in progress."""

    method: Method
    net: Elastic
    data: FederatedData
    fleet: Fleet
    settings: RunSettings
    run_state: RunState

    def __post_init__(self) -> None:
        self.full_macs = self.net.macs(self.net.full, training=True)
        self.param_bytes = nbytes(self.run_state.server_state.params)
        self.manifests = ManifestBuilder(self.method, self.net)
        self.device_data: dict[int, tuple[int, tuple[int, ...]]] = {}
        # checked once: isinstance with a protocol takes longer than the rest of `macs`
        self.cost_method = self.method if isinstance(self.method, HasStepCost) else None

    def macs(self, row: int, key: TaskKey, step: int) -> float:
        """Return the MACs per sample of a training step."""
        if self.cost_method is not None:
            return self.cost_method.macs(self.net, row, key, step)
        subnet = self.method.select_subnet(self.net, row, key, step)
        if subnet is self.net.full:
            return self.full_macs
        return self.net.macs(subnet, training=True)

    def count_extra_bytes(self) -> tuple[int, int]:
        """Return the bytes sent down and up besides the network."""
        method = self.method
        up = method.extra_upload_bytes(self.net) if isinstance(method, HasExtraUpload) else 0
        return nbytes(self.run_state.server_state.broadcast), up


def simulate(
    method: Method,
    net: nn.Module,
    data: FederatedData,
    fleet: Fleet,
    *,
    rounds: int | None = None,
    settings: RunSettings | None = None,
    workers: AnyWorkers | None = None,
    folder: Path | None = None,
    make_inputs: WorkerInputFactory | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RoundRecord]:
    """Train a network across a fleet and yield a record of every round.

    With a `folder`, the run writes its records and checkpoints there and resumes from the newest
    checkpoint; `load_trained_params(folder)` returns the trained network. `net` itself is not
    changed. `make_inputs` rebuilds the network and the data in worker processes, where that is
    cheaper than copying them. When `is_stopped` returns true, the run saves a checkpoint and ends.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.ImageDataset.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.TrainTestData(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> fleet = pl.Fleet(size=4, speed=pl.ChangingTrace(low=0.25, high=1.0, per_round=2.0))
    >>> settings = pl.RunSettings(rounds=2, per_round=2, rules=pl.RoundRules(late="partial"))
    >>> rounds = pl.simulate(pl.Distreal(), pl.models.digits_cnn(), data, fleet, settings=settings)
    >>> [record.tasks for record in rounds]
    [2, 2]
    """
    settings = settings or RunSettings()
    if rounds is not None:
        settings = msgspec.structs.replace(settings, rounds=rounds)
    store = RunStore(folder) if folder is not None else None
    try:
        run_state = store.resume() if store else None
        run_state = run_state or RunState(0, 0.0, ServerState(get_params(net)), {})
        setup = partial(build_context, make_inputs or partial(_return_inputs, net, data), method)
        with open_pool(workers or InlineWorkers(), setup, run_job) as pool:
            # only now, while worker processes start
            elastic_net = elastic(net, make_example_input(data))
            run = _Run(method, elastic_net, data, fleet, settings, run_state)
            yield from _run_rounds(run, pool, store, is_stopped)
    finally:
        if store:
            store.close()


def _return_inputs(net: nn.Module, data: FederatedData) -> tuple[nn.Module, FederatedData]:
    return net, data


def _run_rounds(
    run: _Run, pool: Pool[Job, Update], store: RunStore | None, is_stopped: Callable[[], bool]
) -> Iterator[RoundRecord]:
    queue: EventQueue[str] = EventQueue()
    settings = run.settings
    if run.run_state.next_round < settings.rounds:
        queue.add(run.run_state.seconds, "open")
    for now, _ in queue:
        number = run.run_state.next_round
        table, tasks = _schedule_round(run, number, now)
        updates, rejections = _train_round(run, pool, number, table, tasks)
        if len(updates) < settings.rules.quorum_size(settings.per_round):
            updates = []  # rejected updates do not count, so the round is void
        old_params = run.run_state.server_state.params
        state = run.method.merge(run.net, run.run_state.server_state, updates)
        device_states = run.run_state.device_states | {
            u.device: u.device_state for u in updates if u.device_state
        }
        closed_at = now + table.closed_at
        run.run_state = RunState(number + 1, closed_at, state, device_states)
        records = _build_task_records(run, number, table, tasks, updates, rejections)
        total = sum_tasks(number, closed_at, records)
        is_last = number + 1 == settings.rounds
        if is_last or (number + 1) % settings.evaluation.every == 0:
            total = _evaluate_round(run, total, old_params, state, updates)
        if is_last:
            total = msgspec.structs.replace(total, digest=digest(state.params))
        is_over = is_last or is_stopped()
        if store:
            store.append([*records, total])
            if is_over or (number + 1) % settings.checkpoint_every == 0:
                store.save(run.run_state)
        if not is_over:
            queue.add(closed_at, "open")
        yield total


def _evaluate_round(
    run: _Run, record: RoundRecord, old_params: Params, state: ServerState, updates: list[Update]
) -> RoundRecord:
    """Add scores to a round: per device if devices have their own test images, else overall."""
    if not run.data.test_shares:
        return msgspec.structs.replace(
            record,
            score=_evaluate_params(run, state.params),
            trained_score=_evaluate_trained_subnet(run, state),
        )
    trained = {
        update.device: {name: old_params[name] + delta for name, delta in update.delta.items()}
        for update in updates
        if update.subnet is None
    }
    personal = evaluate_per_device(
        run.net.module, state.params, trained, run.data, run.settings.evaluation
    )
    return msgspec.structs.replace(record, personal=personal)


def _evaluate_params(run: _Run, params: Params) -> Score:
    return evaluate(run.net.module, params, run.data, run.settings.evaluation)


def _evaluate_trained_subnet(run: _Run, state: ServerState) -> Score | None:
    """Score the network without the filters that no device has trained yet, if there are any."""
    if not isinstance(run.method, TracksCoverage):
        return None
    subnet = run.method.find_trained_subnet(run.net, state)
    if subnet is None:
        return None
    packed = run.net.take(state.params, subnet)
    return _evaluate_params(run, run.net.embed(state.params, packed, subnet)[0])


def _schedule_round(run: _Run, round_number: int, now: float) -> tuple[Timetable, RoundTasks]:
    """Select devices and compute when each of their mini-batches starts and ends."""
    settings = run.settings
    devices = select_devices(
        run.fleet,
        settings.rules.selection_size(settings.per_round),
        settings.select,
        seed=settings.seed,
        round=round_number,
        now=now,
    )
    sizes = _compute_batch_sizes(run, devices)
    full_macs = sizes * run.full_macs
    param_bytes = np.full(len(devices), float(run.param_bytes))
    down, up = run.count_extra_bytes()
    tasks = RoundTasks(devices, full_macs, param_bytes + down, param_bytes + up)
    policy = run.method.make_budget_policy(run.net)
    if policy.is_per_round and policy is not FULL_NETWORK:  # a subnet may be sent: fewer bytes
        status = compute_start_status(run.fleet, tasks, seed=settings.seed, start=now)
        choice = policy.choose(status)
        sent = _count_sent_bytes(run, round_number, devices, choice.row)
        tasks = RoundTasks(devices, full_macs, sent + down, sent + up)
        policy = FixedChoice(status, choice)
    task_index = {device: index for index, device in enumerate(devices.tolist())}

    def compute_step_cost(active_devices: IntArray, step: int, choice: RowChoice) -> FloatArray:
        costs = np.empty(len(active_devices))
        for index, device in enumerate(active_devices.tolist()):
            key = TaskKey(settings.seed, round_number, device)
            macs = run.macs(int(choice.row[index]), key, step)
            costs[index] = sizes[task_index[device], step] * macs
        return costs

    table = build_timetable(
        run.fleet,
        policy,
        tasks,
        settings.rules,
        seed=settings.seed,
        round=round_number,
        start=now,
        target_updates=settings.per_round,
        step_cost=compute_step_cost,
    )
    return table, tasks


def _count_sent_bytes(
    run: _Run, round_number: int, devices: IntArray, rows: IntArray
) -> FloatArray:
    """Return the bytes that each device is sent: the network or a packed subnet."""
    sent = np.full(len(devices), float(run.param_bytes))
    for index, (device, row) in enumerate(zip(devices.tolist(), rows.tolist(), strict=True)):
        subnet = run.method.subnet_to_send(
            run.net, row, TaskKey(run.settings.seed, round_number, device)
        )
        if subnet is not None:
            sent[index] = nbytes(run.net.take(run.run_state.server_state.params, subnet))
    return sent


def _compute_batch_sizes(run: _Run, devices: IntArray) -> FloatArray:
    """Return the samples of each mini-batch, as (device, step)."""
    shares = [run.data.shares[device % len(run.data)] for device in devices.tolist()]
    sizes = [make_local_work(len(share), run.method.local, run.full_macs).sizes for share in shares]
    longest = max(map(len, sizes), default=1)  # there may be no devices
    padded = [row + (0,) * (longest - len(row)) for row in sizes]
    return np.array(padded, np.float64).reshape(len(sizes), longest)


def _train_round(
    run: _Run, pool: Pool[Job, Update], round_number: int, timetable: Timetable, tasks: RoundTasks
) -> tuple[list[Update], dict[int, str]]:
    """Train the tasks that count; return the valid updates and the reasons for rejections."""
    local, settings = run.method.local, run.settings
    lr = local.schedule.lr_at(local.optimiser.lr, round_number, settings.rounds)
    batch_sizes = np.rint(tasks.full_macs / run.full_macs).astype(np.int64)
    max_macs = np.maximum(tasks.full_macs, timetable.planned)  # a method may charge several passes
    jobs, bounds = [], []
    for index, device in enumerate(timetable.devices.tolist()):
        used = int(timetable.used_steps[index])
        if used:
            rows = tuple(timetable.row[index, :used].tolist())
            macs = tuple(timetable.planned[index, :used].tolist())
            key = TaskKey(settings.seed, round_number, device)
            state = run.run_state.device_states.get(device, {})
            jobs.append(Job(key, rows, macs, lr, state, *_summarise_device_data(run, device)))
            bounds.append((batch_sizes[index, :used].tolist(), max_macs[index, :used].tolist()))
    shared = dict(run.run_state.server_state.params)
    shared |= {
        f"{EXTRA_PREFIX}{name}": tensor
        for name, tensor in run.run_state.server_state.broadcast.items()
    }
    updates = pool.run(jobs, shared, cost=lambda job: job.cost) if jobs else []
    manifests = {
        job.key.device: run.manifests.build(shared, job, *bound)
        for job, bound in zip(jobs, bounds, strict=True)
    }
    replies = ((job.key.device, update) for job, update in zip(jobs, updates, strict=True))
    return accept_valid(replies, manifests, settings.guard)


def _summarise_device_data(run: _Run, device: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of samples on a device, and their classes."""
    share_index = device % len(run.data)
    if share_index not in run.device_data:
        share = run.data.shares[share_index]
        classes = np.unique(run.data.train.labels.numpy()[share])
        run.device_data[share_index] = len(share), tuple(classes.tolist())
    return run.device_data[share_index]


def _build_task_records(
    run: _Run,
    round_number: int,
    timetable: Timetable,
    tasks: RoundTasks,
    updates: list[Update],
    rejections: dict[int, str],
) -> list[TaskRecord]:
    """Return what each task of a round cost and how it ended."""
    costs = run.fleet.get_costs(timetable.devices, seed=run.settings.seed)
    updates_by_device = {update.device: update for update in updates}
    up = np.where(np.isfinite(timetable.arrival), tasks.up_bytes, 0.0)
    joules = compute_joules(costs, timetable.spent, tasks.down_bytes + up)
    # a device whose update does not count stops when the round closes
    limit = np.where(timetable.used_steps > 0, np.inf, timetable.closed_at)[:, None]
    started = (timetable.start < limit).sum(axis=1).tolist()
    ended = (np.isfinite(timetable.end) & (timetable.end <= limit)).sum(axis=1).tolist()
    records = []
    for index, device in enumerate(timetable.devices.tolist()):
        update, reason = updates_by_device.get(device), rejections.get(device)
        records.append(
            TaskRecord(
                round=round_number,
                device=device,
                outcome=_describe_outcome(timetable, index, update, reason),
                samples=update.samples if update else 0,
                steps=int(timetable.used_steps[index]) if update else 0,
                macs=float(timetable.spent[index]),
                useful=float(timetable.useful[index]) if update else 0.0,
                available=float(timetable.available[index]),
                down=int(tasks.down_bytes[index]),
                up=int(up[index]),
                seconds=float(timetable.busy[index]),
                joules=float(joules[index]),
                loss=update.loss if update else None,
                starts=tuple(timetable.start[index, : started[index]].tolist()),
                ends=tuple(timetable.end[index, : ended[index]].tolist()),
                rows=tuple(timetable.row[index, : started[index]].tolist()),
                short=int(timetable.is_short[index, : started[index]].sum()),
            )
        )
    return records


def _describe_outcome(
    timetable: Timetable, index: int, update: Update | None, reason: str | None
) -> str:
    if reason:
        return f"rejected: {reason}"
    is_void = update is None and timetable.used_steps[index] > 0
    return (TaskOutcome.VOID if is_void else TaskOutcome(timetable.outcomes[index])).name.lower()
