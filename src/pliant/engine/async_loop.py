"""Asynchronous devices: a number of tasks is always in flight, and updates are merged as they come.

A version of the network takes the place of a round. With a buffer of one this is the loop of
FedAsync (Xie et al., "Asynchronous federated optimization", OPT 2020), with a larger one that of
FedBuff (Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022);
how updates are weighted by their staleness is up to the method.
"""

from dataclasses import replace
from functools import partial

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
from pliant.engine.simulated_devices import complete_record, draft_task_records, schedule_round
from pliant.methods.base import TaskKey, Update
from pliant.methods.validation import accept_valid
from pliant.params import Params
from pliant.workers.pool import Pool


class AsyncDevices:
    """The transport of an asynchronous simulation: merge whenever `buffer` updates have arrived.

    A device at work, or whose update waits in the buffer, gets no other task. Updates that arrive
    at one instant are all in before idle devices get tasks.
    """

    def __init__(self, pool: Pool[Job, Update], *, concurrency: int, buffer: int) -> None:
        if not 1 <= buffer <= concurrency:
            raise ValueError(f"Expected a buffer of 1 to {concurrency} updates, got {buffer}")
        self._pool, self._concurrency, self._buffer = pool, concurrency, buffer
        self._queue: EventQueue | None = None
        self._dispatch_at: float | None = None  # planned
        self._tasks: dict[int, TaskInFlight] = {}  # by device
        self._jobs: dict[int, tuple[Job, int]] = {}  # with their numbers in the pool, by device
        self._base_params: dict[int, Params] = {}  # by version
        self._pool_versions: dict[int, int] = {}

    def select(self, run: Run) -> list[int]:
        """Select nobody yet: more updates may arrive at this instant."""
        return []

    def dispatch(self, run: Run, devices: list[int]) -> None:
        """Let idle devices get tasks once all updates of this instant are in."""
        if self._queue is None:
            self._resume(run)
        self._plan_dispatch(run.state.seconds)

    def collect(self, run: Run) -> RoundResult:
        """Let time pass until the buffer is full."""
        assert self._queue is not None
        updates: list[Update] = []
        records: list[TaskRecord] = []
        while len(updates) < self._buffer:
            event = self._queue.pop()
            if event.kind is EventKind.DISPATCH:
                self._dispatch_at = None
                self._send_tasks(run, {update.device for update in updates})
                continue
            update, record = self._end_task(run, event.device)
            updates += [update] if update is not None else []
            records.append(record)
            self._plan_dispatch(self._queue.now)
        if run.state.next_round + 1 == run.num_rounds:
            records += self._abandon_tasks()
        run.state = replace(
            run.state,
            in_flight=tuple(self._tasks[device] for device in sorted(self._tasks)),
            base_params=dict(self._base_params),
        )
        return RoundResult(
            sorted(updates, key=lambda update: update.device),
            sorted(records, key=lambda record: record.device),
            self._queue.now,
            {u.device: u.device_state for u in updates if u.device_state is not None},
            residuals={u.device: u.residual for u in updates if u.residual},
        )

    def _push(self, event: Event) -> None:
        assert self._queue is not None
        self._queue.push(event)

    def _plan_dispatch(self, time: float) -> None:
        if self._dispatch_at != time:
            self._dispatch_at = time
            self._push(Event(time, EventKind.DISPATCH))

    def _resume(self, run: Run) -> None:
        """Give the pool the tasks that were in flight when the run was saved."""
        self._queue = EventQueue(now=run.state.seconds)
        self._base_params = dict(run.state.base_params)
        for task in run.state.in_flight:
            self._start_task(run, task)

    def _send_tasks(self, run: Run, waiting: set[int]) -> None:
        """Send idle devices tasks until as many as allowed are in flight."""
        assert self._queue is not None
        settings, state, now = run.settings, run.state, self._queue.now
        missing = self._concurrency - len(self._tasks) - len(waiting)
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
            busy={*self._tasks, *waiting},
        )
        if len(devices):
            self._base_params.setdefault(state.next_round, run.shared_params)
        for device in devices.tolist():  # alone, since its costs end with its own task
            self._start_task(run, _schedule_task(run, device, now))
        run.state = replace(state, dispatches=state.dispatches + 1)
        if not self._tasks:  # nobody is available now
            self._plan_dispatch(now + run.fleet.round_seconds)

    def _start_task(self, run: Run, task: TaskInFlight) -> None:
        """Queue the end of a task, and its training if the server gets an update."""
        device = task.key.device
        kind = EventKind.ARRIVAL if task.rows else EventKind.DEPARTURE
        self._tasks[device] = task
        self._push(Event(task.ends_at, kind, device, task.key.round))
        if task.rows:
            if task.base not in self._pool_versions:
                self._pool_versions[task.base] = self._pool.share(self._base_params[task.base])
            job = replace(make_job(run, task.key, task.rows, task.macs), lr=task.lr)
            self._jobs[device] = job, self._pool.submit(job, self._pool_versions[task.base])

    def _end_task(self, run: Run, device: int) -> tuple[Update | None, TaskRecord]:
        """Return the update of a task that ends, if it is valid, and the task's record."""
        task = self._tasks.pop(device)
        record = msgspec.structs.replace(task.record, round=run.state.next_round)
        update, reason = None, None
        if task.rows:
            job, number = self._jobs.pop(device)
            _, reply = self._pool.collect([number])
            manifest = make_manifest(run, self._base_params[task.base], job)
            update, reason = accept_valid(reply, manifest, run.settings.guard)
        self._forget_versions()
        if update is not None:
            update = replace(update, staleness=run.state.next_round - task.base)
        return update, complete_record(record, update, reason)

    def _abandon_tasks(self) -> list[TaskRecord]:
        """End the tasks in flight with the run; their records hold the costs of the whole task."""
        outcome = TaskOutcome.SURPLUS.name.lower()
        records = [
            msgspec.structs.replace(task.record, outcome=outcome, steps=0, useful=0.0)
            for task in self._tasks.values()
        ]
        self._pool.cancel()
        self._tasks, self._jobs = {}, {}
        self._forget_versions()
        return records

    def _forget_versions(self) -> None:
        needed = {task.base for task in self._tasks.values()}
        for version in self._base_params.keys() - needed:
            del self._base_params[version]
            if version in self._pool_versions:
                self._pool.release(self._pool_versions.pop(version))


def _schedule_task(run: Run, device: int, now: float) -> TaskInFlight:
    """Return a device's task from now on, which nobody interrupts."""
    number = run.state.dispatches
    rules = msgspec.structs.replace(run.settings.rules, late="wait", quorum=0.0)
    timetable = schedule_round(run, np.array([device]), number=number, start=now, rules=rules)
    [record] = draft_task_records(run, timetable)
    return TaskInFlight(
        TaskKey(run.settings.seed, number, device),
        *list_used_steps(timetable, 0),
        run.lr,
        run.state.next_round,
        now + timetable.closed_at,
        record,
    )
