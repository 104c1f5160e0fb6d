"""Asynchronous devices: a number of tasks is always in flight, and updates are merged as they come.

A version of the network takes the place of a round. With a buffer of one this is the loop of
FedAsync (Xie et al., "Asynchronous federated optimization", OPT 2020), with a larger one that of
FedBuff (Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022);
how updates are weighted by their staleness is up to the method.
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from pliant.engine.event_queue import Event, EventKind, EventQueue
from pliant.engine.ledger import TaskRecord
from pliant.engine.local_work import Job
from pliant.engine.round_loop import RoundResult, Run
from pliant.engine.round_rules import TaskOutcome
from pliant.engine.round_training import list_used_steps, make_job, make_manifest
from pliant.engine.run_store import TaskInFlight
from pliant.engine.selection import select_devices
from pliant.engine.simulated_devices import (
    Dispatch,
    complete_record,
    draft_task_records,
    schedule_round,
)
from pliant.engine.timetable import Timetable
from pliant.methods.base import TaskKey, Update
from pliant.methods.validation import accept_valid
from pliant.methods.verbs import RunsAsynchronously, WrapsMethod
from pliant.params import Params
from pliant.workers.pool import Pool

MAX_IDLE_ROUNDS = 8192  # lengths of a round without any update, before the server gives up


class TaskRunner(Protocol):
    """Who trains the tasks whose ends virtual time has planned."""

    def start(self, run: Run, task: TaskInFlight, shared: Params) -> None:
        """Begin a task with what its device is sent."""

    def finish(
        self, run: Run, task: TaskInFlight, shared: Params
    ) -> tuple[Update | None, str | None]:
        """Wait for a task's update; return it, or the reason why it is not valid."""

    def forget_versions(self, needed: set[int]) -> None:
        """Release what was kept for tasks of other versions."""

    def cancel(self) -> None:
        """Stop all tasks."""


class PooledTasks:
    """Train the tasks of a simulation in a pool of workers."""

    def __init__(self, pool: Pool[Job, Update]) -> None:
        self._pool = pool
        self._jobs: dict[int, tuple[Job, int]] = {}  # with their numbers in the pool, by device
        self._pool_versions: dict[int, int] = {}

    def start(self, run: Run, task: TaskInFlight, shared: Params) -> None:
        if task.base not in self._pool_versions:
            self._pool_versions[task.base] = self._pool.share(shared)
        job = make_job(run, task.key, task.rows, task.macs, sent_at=task.sent_at)
        job = replace(job, lr=task.lr)
        number = self._pool.submit(job, self._pool_versions[task.base])
        self._jobs[task.key.device] = job, number

    def finish(
        self, run: Run, task: TaskInFlight, shared: Params
    ) -> tuple[Update | None, str | None]:
        job, number = self._jobs.pop(task.key.device)
        _, reply = self._pool.collect([number])
        return accept_valid(reply, make_manifest(run, shared, job), run.settings.guard)

    def forget_versions(self, needed: set[int]) -> None:
        for version in self._pool_versions.keys() - needed:
            self._pool.release(self._pool_versions.pop(version))

    def cancel(self) -> None:
        self._pool.cancel()
        self._jobs = {}


class AsyncDevices:
    """The transport of an asynchronous run in virtual time: merge whenever the buffer is full.

    A device at work, or whose update waits in the buffer, gets no other task. Updates that arrive
    at one instant are all in before idle devices get tasks.
    """

    def __init__(self, runner: TaskRunner, method: RunsAsynchronously) -> None:
        self._runner, self._method = runner, method
        self._queue: EventQueue | None = None
        self._dispatch_number = 0  # of the last one planned, which replaces earlier ones
        self._tasks: dict[int, TaskInFlight] = {}  # by device
        self._base_params: dict[int, Params] = {}  # by version

    def select(self, run: Run) -> list[int]:
        """Select nobody yet: more updates may arrive at this instant."""
        return []

    def dispatch(self, run: Run, devices: list[int]) -> None:
        """Let idle devices get tasks once all updates of this instant are in."""
        run.now = None
        if self._queue is None:
            self._resume(run)
        self._plan_dispatch(run.state.seconds)

    def collect(self, run: Run) -> RoundResult:
        """Let time pass until the buffer is full, or the run ends."""
        assert self._queue is not None
        updates, records = self._fill_buffer(run, self._queue)
        if len(updates) < self._method.buffer:  # the run ends, and nothing is merged
            updates, records = [], [_make_surplus(record) for record in records]
        if run.ends_with(run.state.next_round, self._queue.now):
            records += self._abandon_tasks(run)
        run.state = replace(
            run.state,
            in_flight=tuple(self._tasks[device] for device in sorted(self._tasks)),
            base_params=dict(self._base_params),
        )
        updates = sorted(updates, key=lambda update: update.device)
        return RoundResult(
            updates,
            sorted(records, key=lambda record: (record.device, record.sent_at)),
            self._queue.now,
            {u.device: u.device_state for u in updates if u.device_state is not None},
            residuals={u.device: u.residual for u in updates if u.residual},
            server_state=merge_buffer(run, self._method, updates),
        )

    def _fill_buffer(self, run: Run, queue: EventQueue) -> tuple[list[Update], list[TaskRecord]]:
        """Let time pass; return the updates in the buffer, and the tasks that have ended."""
        updates: list[Update] = []
        records: list[TaskRecord] = []
        last_update = run.state.seconds
        while len(updates) < self._method.buffer:
            event = queue.pop()
            if event.kind is EventKind.DEADLINE:
                break
            if event.kind is EventKind.DISPATCH:
                if event.number == self._dispatch_number:
                    self._send_tasks(run, {update.device for update in updates})
            else:
                update, record = self._end_task(run, event.device)
                updates += [update] if update is not None else []
                last_update = queue.now if update is not None else last_update
                records.append(record)
                self._plan_dispatch(queue.now)
            if queue.now - last_update > MAX_IDLE_ROUNDS * run.fleet.round_seconds:
                raise ValueError(
                    f"Expected an update within {queue.now - last_update:g} s, got none since "
                    f"{last_update:g} s: no device is available, or all work is lost"
                )
        return updates, records

    def _push(self, event: Event) -> None:
        assert self._queue is not None
        self._queue.push(event)

    def _plan_dispatch(self, time: float) -> None:
        self._dispatch_number += 1
        self._push(Event(time, EventKind.DISPATCH, number=self._dispatch_number))

    def _resume(self, run: Run) -> None:
        """Start the tasks again that were in flight when the run was saved."""
        self._queue = EventQueue(now=run.state.seconds)
        if run.settings.seconds is not None:
            self._push(Event(run.settings.seconds, EventKind.DEADLINE))
        self._base_params = dict(run.state.base_params)
        for task in run.state.in_flight:
            self._start_task(run, task)

    def _send_tasks(self, run: Run, waiting: set[int]) -> None:
        """Send idle devices tasks until as many as allowed are in flight."""
        assert self._queue is not None
        settings, state, now = run.settings, run.state, self._queue.now
        missing = (self._method.concurrency or run.target_updates) - len(self._tasks)
        busy = {*self._tasks, *waiting}
        missing = min(missing, run.fleet.size - len(busy))
        if missing <= 0:
            return
        devices = select_devices(
            run.fleet.size,
            missing,
            settings.select,
            seed=settings.seed,
            round=state.dispatches,
            speeds=partial(run.fleet.speeds_at, time=now, seed=settings.seed),
            history=state.history,
            busy=busy,
        )
        run.now = now
        if len(devices):
            self._base_params.setdefault(state.next_round, run.shared_params)
        for device in devices.tolist():  # alone, since its costs end with its own task
            self._start_task(run, self._schedule_task(run, device, now))
        run.state = replace(state, dispatches=state.dispatches + 1)
        if len(devices) < missing:  # not all are available now
            self._plan_dispatch(now + run.fleet.round_seconds)

    def _schedule_task(self, run: Run, device: int, now: float) -> TaskInFlight:
        """Return a device's task from now on."""
        key = TaskKey(run.settings.seed, run.state.dispatches, device)
        timetable = self._schedule(run, key, now, run.last_row)
        [record] = draft_task_records(run, timetable)
        [(rows, macs)] = list_used_steps(timetable)
        return TaskInFlight(
            key,
            rows,
            macs,
            run.compute_lr(device),
            run.state.next_round,
            now,
            run.last_row,
            now + timetable.closed_at,
            msgspec.structs.replace(record, sent_at=now),
        )

    def _schedule(
        self, run: Run, key: TaskKey, start: float, last_row: int | None, closes_at: float = np.inf
    ) -> Timetable:
        """Return the timetable of one task: that of a round of its own, without a quorum."""
        changes = {"late": "wait"} if self._method.work == "pass" else {"close_early": True}
        rules = msgspec.structs.replace(run.settings.rules, quorum=0.0, **changes)
        dispatch = Dispatch(key.round, start, rules, last_row, closes_at)
        return schedule_round(run, np.array([key.device]), dispatch)

    def _start_task(self, run: Run, task: TaskInFlight) -> None:
        """Queue the end of a task, and its training if the server gets an update."""
        device = task.key.device
        kind = EventKind.ARRIVAL if task.rows else EventKind.DEPARTURE
        self._tasks[device] = task
        self._push(Event(task.ends_at, kind, device, task.key.round))
        if task.rows:
            self._runner.start(run, task, self._base_params[task.base])

    def _end_task(self, run: Run, device: int) -> tuple[Update | None, TaskRecord]:
        """Return the update of a task that ends, if it is valid, and the task's record."""
        task = self._tasks.pop(device)
        version, sent = run.state.next_round, self._base_params[task.base]
        staleness = version - task.base
        assert task.record is not None
        record = msgspec.structs.replace(task.record, round=version, staleness=staleness)
        update, reason = None, None
        if task.rows:
            update, reason = self._runner.finish(run, task, sent)
        self._forget_versions()
        if update is not None:
            update = date_update(run, update, task, sent, task.ends_at)
        return update, complete_record(record, update, reason)

    def _abandon_tasks(self, run: Run) -> list[TaskRecord]:
        """End the tasks in flight with the run, and return what they have cost so far."""
        assert self._queue is not None
        records, version = [], run.state.next_round
        for task in self._tasks.values():
            start, closes_at = task.sent_at, self._queue.now - task.sent_at
            [record] = draft_task_records(
                run, self._schedule(run, task.key, start, task.last_row, closes_at)
            )
            staleness = version - task.base
            record = msgspec.structs.replace(record, sent_at=start, staleness=staleness)
            records.append(_make_surplus(record))
        self._runner.cancel()
        self._tasks = {}
        self._forget_versions()
        return records

    def _forget_versions(self) -> None:
        needed = {task.base for task in self._tasks.values()}
        self._base_params = {v: params for v, params in self._base_params.items() if v in needed}
        self._runner.forget_versions(needed)


def date_update(
    run: Run, update: Update, task: TaskInFlight, sent: Params, arrival: float
) -> Update:
    """Return an update with its staleness, the network that it was sent and the time it took."""
    base = {name: sent[name] for name in run.state.server_state.params}
    staleness = run.state.next_round - task.base
    return replace(update, staleness=staleness, base=base, seconds=arrival - task.sent_at)


def merge_buffer(run: Run, method: RunsAsynchronously, updates: list[Update]) -> object:
    """Return the server's state after a full buffer, or the same one if it is empty."""
    if not updates:
        return run.state.server_state
    if isinstance(method, WrapsMethod):
        net, params = run.context.net, run.state.server_state.params
        updates = [method.discount(net, params, update) for update in updates]
    return run.context.merge(run.state.server_state, updates)


def _make_surplus(record: TaskRecord) -> TaskRecord:
    """Return the record of a task whose update the run no longer needs."""
    if record.outcome.startswith(("dropped", "late", "rejected")):
        return record
    outcome = TaskOutcome.SURPLUS.name.lower()
    return msgspec.structs.replace(
        record, outcome=outcome, samples=0, steps=0, useful=0.0, loss=None
    )
