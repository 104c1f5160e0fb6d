"""Simulated devices: the transport of rounds in virtual time, and the schedule of their tasks."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pliant.compression import Uncompressed
from pliant.devices import FULL_NETWORK, FixedChoice, RowChoice, compute_joules
from pliant.devices.budget import BoolArray
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.ledger import TaskRecord
from pliant.engine.local_work import Job
from pliant.engine.round_loop import RoundResult, Run
from pliant.engine.round_rules import RoundRules, TaskOutcome
from pliant.engine.round_tasks import RoundTasks
from pliant.engine.round_training import TrainedRound, make_jobs, train_round
from pliant.engine.selection import select_devices
from pliant.engine.task_control import count_task_control
from pliant.engine.task_costs import count_batch_macs, count_sent_bytes, find_fitting_rows
from pliant.engine.timetable import Timetable, build_timetable, compute_start_status
from pliant.methods.base import TaskKey, TaskKeys, Update
from pliant.methods.error_feedback import count_update_bytes
from pliant.params import nbytes
from pliant.workers.pool import Pool

StepTimes = tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]  # starts, ends, rows

_LABELS = [outcome.label for outcome in TaskOutcome]


class SimulatedDevices:
    """The transport of a simulation: a timetable first, then training what it lets count."""

    def __init__(self, pool: Pool[Job, Update]) -> None:
        self._pool = pool

    def select(self, run: Run) -> list[int]:
        settings = run.settings
        devices: list[int] = select_devices(
            run.fleet.size,
            settings.rules.selection_size(run.target_updates),
            settings.select,
            seed=settings.seed,
            round=run.state.next_round,
            speeds=partial(run.fleet.speeds_at, time=run.state.seconds, seed=settings.seed),
            history=run.state.history,
        ).tolist()
        return devices

    def dispatch(self, run: Run, devices: list[int]) -> None:
        self._timetable = schedule_round(run, np.array(devices, np.int64))

    def collect(self, run: Run) -> RoundResult:
        trained = train_round(run, self._pool, make_jobs(run, self._timetable))
        if len(trained.updates) < run.settings.rules.quorum_size(run.target_updates):
            # rejected updates do not count, so the round is void
            trained = TrainedRound([], trained.rejections, {}, {})
        by_device = {update.device: update for update in trained.updates}
        tasks = [
            complete_record(
                draft, by_device.get(draft.device), trained.rejections.get(draft.device)
            )
            for draft in draft_task_records(run, self._timetable)
        ]
        return RoundResult(
            trained.updates,
            tasks,
            run.state.seconds + self._timetable.closed_at,
            trained.device_states,
            residuals=trained.residuals,
            server_state=trained.server_state,
        )


@dataclass(frozen=True)
class Dispatch:
    """When and by which rules tasks are sent, if not at the start of the next round."""

    number: int  # in the addresses of random numbers
    start: float  # seconds of the run
    rules: RoundRules
    last_row: int | None  # that devices may choose
    closes_at: float = math.inf  # seconds since the start, at which the server waits no longer


def schedule_round(run: Run, devices: IntArray, dispatch: Dispatch | None = None) -> Timetable:
    """Return the timetable of the next round, or of tasks that are sent at another time."""
    context, settings = run.context, run.settings
    if dispatch is None:
        state = run.state
        dispatch = Dispatch(state.next_round, state.seconds, settings.rules, run.last_row)
    number, start = dispatch.number, dispatch.start
    sizes = context.compute_batch_sizes(devices, start)
    full_macs = sizes * context.full_macs
    server_state, params = run.state.server_state, run.sent_params
    keys = TaskKeys(settings.seed, number, devices)
    down = nbytes(context.broadcast(server_state))
    up = context.extra_upload_bytes
    down_bytes = np.full(len(devices), float(nbytes(params) + down))
    is_plain = isinstance(settings.compression, Uncompressed)
    update_bytes = count_update_bytes(context.net, params, settings.compression)
    up_bytes = np.full(len(devices), float(update_bytes + up))
    fits = find_fitting_rows(context, run.fleet.get_costs(devices, seed=settings.seed), devices)
    passes = context.open_passes
    slowness = context.slowness
    tasks = RoundTasks(devices, full_macs, down_bytes, up_bytes, fits, passes, slowness)
    policy = context.limit_budget(dispatch.last_row)

    def make_packed_tasks(rows: IntArray) -> RoundTasks:
        sent = count_sent_bytes(context, params, rows, keys)
        returned = sent if is_plain else _count_update_bytes(run, rows, keys)
        return RoundTasks(devices, full_macs, sent + down, returned + up, fits, slowness=slowness)

    if policy.is_per_round and policy is not FULL_NETWORK:  # a subnet may be sent: fewer bytes
        tasks_of = make_packed_tasks if context.sends_subnets else None
        status = compute_start_status(
            run.fleet, tasks, seed=settings.seed, start=start, tasks_of=tasks_of
        )
        choice = policy.choose(status)
        tasks = make_packed_tasks(choice.row)
        policy = FixedChoice(status, choice)
    rules = dispatch.rules
    if context.predictor is not None:  # beyond what is expected of its steps
        rules = msgspec.structs.replace(rules, cost="realised")
    # then every step costs what it is planned to
    is_full = policy is FULL_NETWORK and context.trains_full_network
    order = np.argsort(devices)

    def compute_step_cost(active_devices: IntArray, step: int, choice: RowChoice) -> FloatArray:
        active_keys = TaskKeys(keys.seed, keys.round, active_devices)
        index = order[np.searchsorted(devices, active_devices, sorter=order)]
        macs = count_batch_macs(context, choice.row, sizes[index, step], active_keys, step)
        return macs + _count_proxy_macs(run, choice.row) if step == 0 else macs

    return build_timetable(
        run.fleet,
        policy,
        tasks,
        rules,
        seed=settings.seed,
        round=number,
        start=start,
        target_updates=run.target_updates,
        step_cost=None if is_full else compute_step_cost,
        closes_at=dispatch.closes_at,
    )


def _count_proxy_macs(run: Run, rows: IntArray) -> FloatArray | float:
    """Return what each task spends on proxy images."""
    context, state = run.context, run.state.server_state
    predictor = context.predictor
    if predictor is None:
        return 0.0
    return np.array([predictor.proxy_macs(context.net, state, row) for row in rows.tolist()])


def _count_update_bytes(run: Run, rows: IntArray, keys: TaskKeys) -> FloatArray:
    """Return the bytes of each device's encoded delta: of the network or of a packed subnet."""
    context, params = run.context, run.sent_params
    counts = []
    for device, row in zip(keys.devices.tolist(), rows.tolist(), strict=True):
        subnet = context.subnet_to_send(row, TaskKey(keys.seed, keys.round, device))
        counts.append(count_update_bytes(context.net, params, run.settings.compression, subnet))
    return np.array(counts, np.float64)


def draft_task_records(run: Run, timetable: Timetable) -> list[TaskRecord]:
    """Return what each task costs and how it ends if its update turns out valid."""
    costs = run.fleet.get_costs(timetable.devices, seed=run.settings.seed)
    traffic = timetable.down + timetable.up
    joules = compute_joules(costs, timetable.spent, traffic, timetable.idle)
    # a device whose update does not count stops when the round closes
    limit = np.where(timetable.used_steps > 0, np.inf, timetable.closed_at)[:, None]
    is_started = timetable.start < limit
    is_ended = np.isfinite(timetable.end) & (timetable.end <= limit)
    columns = (
        timetable.devices,
        timetable.used_steps,
        timetable.spent,
        timetable.useful,
        timetable.available,
        timetable.down.astype(np.int64),
        timetable.up.astype(np.int64),
        timetable.busy,
        joules,
        (timetable.is_short & is_started).sum(axis=1),
        count_task_control(traffic),
    )
    # reading arrays one number at a time would be slow
    rows = zip(*(column.tolist() for column in columns), strict=True)
    number, labels = run.state.next_round, [_LABELS[x] for x in timetable.outcomes.tolist()]
    steps: list[StepTimes] = [((), (), ())] * len(labels)
    if run.settings.step_records:
        steps = _list_steps(timetable, is_started, is_ended)
    make_record: Any = TaskRecord  # by position: naming so many fields would take twice as long
    return [
        make_record(number, device, label, 0, *costs, None, *times, short, control=control)
        for label, times, (device, *costs, short, control) in zip(labels, steps, rows, strict=True)
    ]


def _list_steps(
    timetable: Timetable, is_started: BoolArray, is_ended: BoolArray
) -> list[StepTimes]:
    """Return the starts, ends and rows of each task's mini-batches."""
    started, ended = is_started.sum(axis=1).tolist(), is_ended.sum(axis=1).tolist()
    columns = timetable.start.tolist(), timetable.end.tolist(), timetable.row.tolist()
    return [
        (tuple(start[:n]), tuple(end[:m]), tuple(row[:n]))
        for start, end, row, n, m in zip(*columns, started, ended, strict=True)
    ]


def complete_record(record: TaskRecord, update: Update | None, reason: str | None) -> TaskRecord:
    """Return a task's record with its merged update, or the reason why it has none."""
    if update is not None:
        return msgspec.structs.replace(record, samples=update.samples, loss=update.loss)
    if not record.steps:
        return record
    outcome = f"rejected: {reason}" if reason else TaskOutcome.VOID.name.lower()
    return msgspec.structs.replace(record, outcome=outcome, steps=0, useful=0.0)
