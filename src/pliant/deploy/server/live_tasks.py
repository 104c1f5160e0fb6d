"""Asynchronous tasks on real devices: a new task as soon as an update is in, and no rounds."""

from collections import deque
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from pliant.deploy.server.replies import (
    DROPPED,
    LATE,
    CheckedReply,
    SentRequest,
    check_reply,
    make_task_record,
)
from pliant.deploy.server.requests import TaskOrder
from pliant.deploy.server.rounds import (
    POLL_SECONDS,
    DeviceTransport,
    MergedRound,
    NotEnoughDevices,
    is_complete,
)
from pliant.deploy.settings import MAX_WAIT_ROUNDS
from pliant.engine.async_loop import date_update, merge_buffer
from pliant.engine.ledger import MERGED_OUTCOMES, TaskRecord
from pliant.engine.round_loop import RoundResult, Run
from pliant.engine.round_rules import TaskOutcome
from pliant.engine.run_store import TaskInFlight
from pliant.methods.base import TaskKey, Update
from pliant.methods.verbs import RunsAsynchronously
from pliant.params import Params
from pliant.rng import rng_stream


@dataclass
class LiveTask:
    """A task on a real device; times are seconds of the run."""

    task: TaskInFlight
    request: SentRequest
    created_at: float  # or created again, after a restart of the server
    sent_at: float | None = None  # once its device was online

    @property
    def started_at(self) -> float:
        """Return when the server began to wait for it."""
        return self.created_at if self.sent_at is None else self.sent_at


class LiveTasks:
    """The transport of an asynchronous run on real devices: merge whenever the buffer is full.

    A device at work, or whose update waits in the buffer, gets no other task; nor does one whose
    last task failed, until the length of a round has passed since it was sent. After a restart,
    the tasks that were in flight at the last merge are sent again.
    """

    def __init__(self, devices: DeviceTransport, method: RunsAsynchronously) -> None:
        self._devices, self._method = devices, method
        self._zero: float | None = None  # second 0 of the run, by the clock
        self._tasks: dict[int, LiveTask] = {}  # by device
        self._arrived: deque[CheckedReply] = deque()  # of tasks above, not yet in the buffer
        self._base_params: dict[int, Params] = {}  # by version
        self._rests_until: dict[int, float] = {}  # devices whose last task failed
        self._last_update = 0.0  # seconds of the run

    def select(self, run: Run) -> list[int]:
        """Select nobody yet: devices get tasks one by one."""
        return []

    def dispatch(self, run: Run, devices: list[int]) -> None:
        """Send the tasks again that were in flight when the server stopped."""
        if self._zero is not None:
            return
        self._zero = self._devices.clock() - run.state.seconds
        self._last_update = run.state.seconds
        self._base_params = dict(run.state.base_params)
        for task in run.state.in_flight:
            self._add_task(run, task)

    def collect(self, run: Run) -> RoundResult:
        """Exchange tasks for updates until the buffer is full."""
        updates: list[Update] = []
        records: list[TaskRecord] = []
        while len(updates) < self._method.buffer:
            online = self._devices.find_ready_devices(run)
            self._send_tasks(run, online, {update.device for update in updates})
            self._receive_replies(run)
            while self._arrived and len(updates) < self._method.buffer:
                update, record = self._end_task(run, self._arrived.popleft())
                updates += [] if update is None else [update]
                records.append(record)
            if len(updates) < self._method.buffer:
                self._check_progress(run, {*online, *(update.device for update in updates)})
                self._devices.sleep(POLL_SECONDS)
        closed_at = self._now
        if run.ends_with(run.state.next_round, closed_at):
            records += self._abandon_tasks(run)
        in_flight = tuple(self._tasks[device].task for device in sorted(self._tasks))
        run.state = replace(run.state, in_flight=in_flight, base_params=dict(self._base_params))
        updates = sorted(updates, key=lambda update: update.device)
        return RoundResult(
            updates,
            sorted(records, key=lambda record: (record.device, cast(float, record.sent_at))),
            closed_at,
            {update.device: update.device_state for update in updates},
            server_state=merge_buffer(run, self._method, updates),
        )

    @property
    def _now(self) -> float:
        assert self._zero is not None
        return self._devices.clock() - self._zero

    def _window(self, run: Run) -> float:
        """Return how long the server waits for an update."""
        rounds = MAX_WAIT_ROUNDS if self._method.work == "pass" else 1 + run.settings.rules.grace
        return run.fleet.round_seconds * rounds + self._devices.settings.allowance

    def _send_tasks(self, run: Run, online: list[int], waiting: set[int]) -> None:
        """Make tasks until as many as allowed are in flight, and send those not yet sent."""
        number, now = run.state.dispatches, self._now
        resting = {device for device, end in self._rests_until.items() if end > now}
        idle = sorted({*online} - self._tasks.keys() - waiting - resting)
        missing = (self._method.concurrency or run.target_updates) - len(self._tasks)
        count = min(missing, len(idle))
        if count > 0:
            rng = rng_stream(run.settings.seed, "select", number)
            indices = rng.choice(len(idle), count, replace=False, shuffle=False)
            selected = sorted(idle[int(index)] for index in indices)
            self._base_params.setdefault(run.state.next_round, run.shared_params)
            choices = self._devices.requester.choose_rows(run, selected)
            for device in selected:
                self._add_task(run, self._make_task(run, device, now, choices.get(device)))
            run.state = replace(run.state, dispatches=number + 1)
        for device, live in self._tasks.items():
            if live.sent_at is None and device in online:
                live.sent_at = self._now
                self._devices.messages.send(
                    {device: live.request.raw},
                    round=live.task.key.round,
                    seconds=self._window(run),
                    adds=True,
                )

    def _make_task(
        self, run: Run, device: int, now: float, choice: tuple[int, float] | None
    ) -> TaskInFlight:
        key, lr = TaskKey(run.settings.seed, run.state.dispatches, device), run.compute_lr(device)
        rows, macs = ((), ()) if choice is None else ((choice[0],), (choice[1],))
        version, end = run.state.next_round, now + self._window(run)
        return TaskInFlight(key, rows, macs, lr, version, now, run.last_row, end, None)

    def _add_task(self, run: Run, task: TaskInFlight) -> None:
        order = TaskOrder(task.key, task.lr, task.last_row)
        if task.rows:
            order = replace(order, row=task.rows[0], macs=task.macs[0])
        shared, seconds = self._base_params[task.base], run.fleet.round_seconds
        request = self._devices.requester.make_request(run, order, shared, seconds)
        self._tasks[task.key.device] = LiveTask(task, request, self._now)

    def _receive_replies(self, run: Run) -> None:
        """Queue the replies that have come, and the ends of tasks without one."""
        ended = {reply.device for reply in self._arrived}
        for message in self._devices.messages.poll_replies():
            live = self._tasks.get(message.device)
            if live is None or live.sent_at is None or message.device in ended:
                continue  # its task has ended
            reply = check_reply(run, live.request, message, self._now - live.sent_at)
            if self._devices.presence is not None:
                self._devices.presence.note_reply(message.device, reply.battery)
            if reply.curve is not None:
                self._devices.requester.curves[message.device] = reply.curve
            self._arrived.append(reply)
            ended.add(message.device)
        lost = self._devices.messages.find_lost_devices()
        for device in sorted(self._tasks.keys() - ended):
            live = self._tasks[device]
            elapsed = self._now - live.started_at
            if live.sent_at is not None and device in lost:
                outcome = f"{DROPPED}: the device has left or was restarted"
                self._arrived.append(CheckedReply(device, elapsed, 0, None, outcome))
            elif elapsed > self._window(run):
                self._arrived.append(CheckedReply(device, elapsed, 0, None, LATE))

    def _end_task(self, run: Run, reply: CheckedReply) -> tuple[Update | None, TaskRecord]:
        """Return the update of a task that ends, if it counts, and the task's record."""
        live = self._tasks.pop(reply.device)
        outcome = self._decide_outcome(run, reply)
        record = self._record_task(run, live, reply, outcome)
        update = reply.update if outcome in MERGED_OUTCOMES else None
        if update is None:
            self._rests_until[reply.device] = live.task.sent_at + run.fleet.round_seconds
        else:
            self._last_update = arrival = self._now
            shared, state = self._base_params[live.task.base], MergedRound(live.task.key.round)
            update = date_update(run, update, live.task, shared, arrival)
            update = replace(update, device_state=state)
        self._forget_versions()
        return update, record

    def _decide_outcome(self, run: Run, reply: CheckedReply) -> str:
        if reply.outcome:
            return reply.outcome
        if is_complete(run, reply):
            return TaskOutcome.FINISHED.name.lower()
        is_partial = self._method.work == "pass" or run.settings.rules.late == "partial"
        return TaskOutcome.PARTIAL.name.lower() if is_partial else LATE

    def _record_task(
        self, run: Run, live: LiveTask, reply: CheckedReply, outcome: str
    ) -> TaskRecord:
        task, version = live.task, run.state.next_round
        waited = live.started_at - task.sent_at
        record = make_task_record(
            run,
            live.request,
            reply,
            outcome,
            waited,
            reply.arrival,
            messages=self._devices.messages,
        )
        available = record.macs * max(1.0, reply.arrival / record.seconds if record.seconds else 0)
        return msgspec.structs.replace(
            record,
            round=version,
            available=available,
            sent_at=task.sent_at,
            staleness=version - task.base,
        )

    def _abandon_tasks(self, run: Run) -> list[TaskRecord]:
        """End the tasks in flight with the run."""
        records, outcome = [], TaskOutcome.SURPLUS.name.lower()
        replies = {reply.device: reply for reply in self._arrived}
        for device, live in self._tasks.items():
            elapsed = self._now - live.started_at
            reply = replies.get(device) or CheckedReply(device, elapsed, 0, None)
            records.append(self._record_task(run, live, reply, reply.outcome or outcome))
        self._tasks, self._arrived = {}, deque()
        self._forget_versions()
        return records

    def _forget_versions(self) -> None:
        needed = {live.task.base for live in self._tasks.values()}
        self._base_params = {v: params for v, params in self._base_params.items() if v in needed}

    def _check_progress(self, run: Run, present: set[int]) -> None:
        """Give up if devices are missing, or none of them has sent a valid update for long."""
        settings, idle = self._devices.settings, self._now - self._last_update
        needed = self._method.buffer
        if len(present) < needed and idle > settings.patience:
            text = f"expected {needed} or more devices online, got {len(present)}"
            raise NotEnoughDevices("; ".join([text, *self._devices.problems]))
        if idle > (settings.retries + 1) * self._window(run):
            raise NotEnoughDevices(f"no device has sent a valid update for {idle:.0f} s")
