"""Rounds on real devices: requests out, replies in, and a deadline that holds whatever they do."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import msgspec
import numpy as np

from pliant.deploy.messages import (
    EXTRA,
    PARAMS,
    TrainReply,
    TrainRequest,
    decode_message,
    encode_message,
)
from pliant.deploy.server.replies import (
    DROPPED,
    LATE,
    CheckedReply,
    RawReply,
    SentRequest,
    check_reply,
    make_task_record,
)
from pliant.deploy.settings import ServerSettings
from pliant.deploy.step_times import StepTimeCurve, parse_curve
from pliant.devices import DeviceStatus
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.ledger import MERGED_OUTCOMES, RoundRecord
from pliant.engine.local_work import Job, make_task
from pliant.engine.round_loop import RoundResult, Run, run_rounds
from pliant.engine.round_rules import TaskOutcome, close_round
from pliant.engine.round_tasks import RoundTasks
from pliant.engine.run_store import RunState, RunStore, read_records
from pliant.engine.selection import select_devices
from pliant.engine.timetable import compute_start_status
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.config import Experiment
from pliant.methods.base import TaskKey, Update
from pliant.methods.state import init_server_state
from pliant.params import get_params
from pliant.rng import rng_stream
from pliant.value import encode

POLL_SECONDS = 0.25
NONCE_BYTES = 16
MAX_WAIT_ROUNDS = 1000  # how long a server with `late = "wait"` waits, in round lengths


@dataclass(frozen=True)
class MergedRound:
    """What the server keeps of a device: the last round of which it merged an update."""

    merged: int


class NotEnoughDevices(RuntimeError):
    """Too few devices are online, or too many consecutive rounds merged no update."""


def serve(
    context: WorkerContext, transport: "DeviceTransport", folder: Path
) -> Iterator[RoundRecord]:
    """Run the remaining rounds of the run in a folder and yield their records."""
    store, retries = RunStore(folder), transport.settings.retries
    try:
        run = make_run(transport.experiment, context, store)
        is_empty = [r.merged == 0 for r in read_records(folder) if isinstance(r, RoundRecord)]
        run.repeated_rounds = sum(is_empty)
        # a run that has given up may retry as often again
        consecutive = len(list(takewhile(bool, reversed(is_empty)))) % (retries + 1)
        for record in run_rounds(run, transport, store):
            yield record
            consecutive = 0 if record.merged else consecutive + 1
            if consecutive > retries:
                raise NotEnoughDevices(f"no update was merged in {consecutive} consecutive rounds")
    finally:
        store.close()


def make_run(experiment: Experiment, context: WorkerContext, store: RunStore | None = None) -> Run:
    """Start or resume a run on real devices; it saves every round, so no merged update is lost."""
    initial = init_server_state(context.method, get_params(context.net.module))
    state = store.resume(type(initial), MergedRound) if store else None
    state = state or RunState(0, 0.0, initial, {})
    settings = msgspec.structs.replace(experiment.settings, checkpoint_every=1)
    return Run(context, experiment.fleet, settings, state, repeats_empty_rounds=True)


class MessageTransport(Protocol):
    """Connect a server with its devices, which are known by their numbers."""

    @property
    def hello_replies(self) -> Mapping[int, bytes]:
        """Return the devices' replies to the server's hello."""

    def find_online_devices(self) -> set[int]:
        """Return the devices that are reachable now."""

    def send(self, requests: Mapping[int, bytes], *, round: int, seconds: float) -> None:
        """Send each device its request, and stop waiting for replies to earlier ones."""

    def poll_replies(self) -> list[RawReply]:
        """Return the replies since the last call, in any order."""


@dataclass
class DeviceTransport:
    """The transport of a run on real devices, over any way to carry messages."""

    experiment: Experiment
    settings: ServerSettings
    messages: MessageTransport
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._config = encode(self.experiment)
        self._curves: dict[int, StepTimeCurve] = {}
        self._has_started = False  # this process has run a round
        self._opened_at = self._sent_at = 0.0
        self.requests: dict[int, SentRequest] = {}  # of the current round
        self.replies: dict[int, CheckedReply] = {}

    def select(self, run: Run) -> list[int]:
        """Wait for devices and select among them; if all are online, as the simulator does."""
        self._opened_at = self.clock()
        fleet, settings, history = run.fleet, run.settings, run.state.history
        target = min(settings.rules.selection_size(run.target_updates), fleet.size)
        quorum = max(1, min(target, settings.rules.quorum_size(run.target_updates)))
        online = self._wait_for_devices(target, quorum, fleet.size)
        self._has_started = True
        selection, number = settings.select, run.state.next_round
        if isinstance(selection, str) and len(online) < fleet.size:
            rng, count = rng_stream(settings.seed, "select", number), min(target, len(online))
            indices = rng.choice(len(online), count, replace=False, shuffle=False)
            return sorted(online[int(index)] for index in indices)

        def estimate_speeds(devices: IntArray) -> FloatArray:
            """Return 1 / the seconds of each device's last task, and 0 if it is offline."""
            seconds = [history[d].seconds if d in history else 0.0 for d in devices.tolist()]
            with np.errstate(divide="ignore"):  # devices without a task count as the fastest
                return np.where(np.isin(devices, online), 1 / np.array(seconds), 0.0)

        devices = select_devices(
            fleet.size,
            target,
            "uniform" if selection == "available" else selection,
            seed=settings.seed,
            round=number,
            speeds=estimate_speeds,
            history=history,
        )
        return [int(device) for device in devices]

    def _wait_for_devices(self, target: int, quorum: int, fleet_size: int) -> list[int]:
        while True:
            online = sorted(d for d in self.messages.find_online_devices() if 0 <= d < fleet_size)
            waited, count = self.clock() - self._opened_at, len(online)
            is_late = waited > self.settings.patience
            may_start = is_late or (self._has_started and waited > self.settings.allowance)
            if count >= target or (may_start and count >= quorum):
                return online
            if is_late:
                raise NotEnoughDevices(f"expected {quorum} or more devices online, got {count}")
            self.sleep(POLL_SECONDS)

    def dispatch(self, run: Run, devices: list[int]) -> None:
        """Send each device its request."""
        raw_requests = self.prepare(run, devices)
        self.messages.send(raw_requests, round=run.state.next_round, seconds=self._window(run))

    def prepare(self, run: Run, devices: list[int]) -> dict[int, bytes]:
        """Start a round: return the encoded request of each device."""
        self.requests, self.replies = self._make_requests(run, devices), {}
        self._sent_at = self.clock()
        return {device: request.raw for device, request in self.requests.items()}

    def collect(self, run: Run) -> RoundResult:
        """Collect replies until all or enough are in, or the deadline passes."""
        rules, window = run.settings.rules, self._window(run)
        while len(self.replies) < len(self.requests) and self._elapsed < window:
            for message in self.messages.poll_replies():
                self.receive(run, message)
            updates = [reply.update for reply in self.replies.values() if reply.update]
            mergeable = [u for u in updates if rules.late == "partial" or self._is_complete(run, u)]
            if rules.closes_at_target and len(mergeable) >= run.target_updates:
                break
            if len(self.replies) < len(self.requests):
                self.sleep(POLL_SECONDS)
        return self.close(run)

    def receive(self, run: Run, message: RawReply) -> None:
        """Validate one reply."""
        reply = check_reply(run, self.requests[message.device], message, self._elapsed)
        self.replies[message.device] = reply
        if reply.curve is not None:
            self._curves[message.device] = reply.curve

    def close(self, run: Run) -> RoundResult:
        """Decide which updates are merged, and record every task."""
        closed_at = self.clock()
        replies = [
            self.replies.get(device) or CheckedReply(device, np.inf, 0, None, LATE)
            for device in sorted(self.requests)
        ]
        outcomes = self._decide_outcomes(run, replies)
        results = list(zip(replies, outcomes, strict=True))
        updates = [
            reply.update for reply, end in results if reply.update and end in MERGED_OUTCOMES
        ]
        waited, number = self._sent_at - self._opened_at, run.state.next_round
        times = waited, closed_at - self._sent_at
        tasks = [
            make_task_record(run, self.requests[reply.device], reply, outcome, *times)
            for reply, outcome in results
        ]
        start = run.state.seconds
        return RoundResult(
            updates,
            tasks,
            start + (closed_at - self._opened_at),
            {update.device: MergedRound(number) for update in updates},
            start + waited,
        )

    @property
    def _elapsed(self) -> float:
        return self.clock() - self._sent_at

    def _window(self, run: Run) -> float:
        """Return how long the server waits for replies."""
        seconds, rules = run.fleet.round_seconds, run.settings.rules
        if rules.late == "wait":
            return seconds * MAX_WAIT_ROUNDS
        return seconds * (1 + rules.grace) + self.settings.allowance

    def _make_requests(self, run: Run, devices: list[int]) -> dict[int, SentRequest]:
        """Return for each device its encoded request and what a valid reply to it looks like."""
        context, shared, number = run.context, run.shared_params, run.state.next_round
        choices, pace = self._choose_rows(run, devices), self.settings.pace
        last_row = run.last_row
        max_share = context.find_max_share(last_row)
        is_waiting = run.settings.rules.late == "wait"
        seconds = self._window(run) if is_waiting else run.fleet.round_seconds
        requests = {}
        for device in devices:
            work = context.plan_work(device)
            row, macs = choices.get(device, (None, 0.0))
            key = TaskKey(run.settings.seed, number, device)
            job = Job(key, (row or 0,), (macs,), run.lr, None, *context.summarise_data(device))
            full_macs = [size * work.full_macs for size in work.sizes]
            factor = max(max_share, macs / full_macs[0])  # some charge for more than one pass
            max_macs = [factor * step_macs for step_macs in full_macs]
            manifest = run.manifests.build(shared, job, work.sizes, max_macs)
            last = run.state.device_states.get(device)
            merged = None if last is None else last.merged
            request = TrainRequest(
                "train",
                self._config,
                device,
                number,
                run.lr,
                pace,
                row,
                macs,
                seconds,
                merged,
                last_row,
                nonce=token_hex(NONCE_BYTES),
            )
            task = make_task(context, shared, job)
            raw = encode_message(request, {PARAMS: task.params, EXTRA: task.extra})
            sent = SentRequest(key, row, last_row, task.extra, raw, manifest, request.nonce)
            requests[device] = sent
        return requests

    def _choose_rows(self, run: Run, devices: list[int]) -> Mapping[int, tuple[int, float]]:
        """Choose rows by the devices' reported speeds, if the method chooses on the server."""
        policy = run.context.budget_policy
        if not policy.is_per_round or not devices:
            return {}
        full_macs = run.context.compute_batch_sizes(np.array(devices)) * run.context.full_macs
        zero = np.zeros(len(devices))
        tasks = RoundTasks(np.array(devices), full_macs, zero, zero)
        if self.settings.pace == "simulated":
            costs = run.fleet.get_costs(tasks.devices, seed=run.settings.seed)
            fits = run.context.find_fitting_rows(costs, tasks.devices)
            tasks = replace(tasks, fits=fits)
            start = run.state.next_round * run.fleet.round_seconds
            status = compute_start_status(run.fleet, tasks, seed=run.settings.seed, start=start)
        else:
            status = self._estimate_status(tasks, run.fleet.round_seconds)
        choice = policy.choose(status)
        rows = zip(choice.row.tolist(), choice.macs.tolist(), strict=True)
        return dict(zip(devices, rows, strict=True))

    def _estimate_status(self, tasks: RoundTasks, round_seconds: float) -> DeviceStatus:
        first_macs, total_macs = tasks.full_macs[:, 0], tasks.full_macs.sum(axis=1)
        speed = total_macs / round_seconds
        for index, device in enumerate(tasks.devices.tolist()):
            curve = self._curves.get(device) or self._read_hello_curve(device)
            if curve is not None:
                slot = round_seconds * first_macs[index] / total_macs[index]
                speed[index] = curve.share_within(slot) * first_macs[index] / slot
        left, now = np.full(len(speed), round_seconds), np.zeros(len(speed))
        return DeviceStatus(
            tasks.devices, 0, now, speed, left, round_seconds, first_macs, total_macs, total_macs
        )

    def _read_hello_curve(self, device: int) -> StepTimeCurve | None:
        try:
            hello, _ = decode_message(self.messages.hello_replies[device], TrainReply)
            return parse_curve(hello.curve)
        except (LookupError, ValueError):
            return None

    def _decide_outcomes(self, run: Run, replies: list[CheckedReply]) -> list[str]:
        """Apply the round rules to the replies and return how each task ended."""
        round_seconds = run.fleet.round_seconds + self.settings.allowance
        arrival, dropout = np.full((2, len(replies)), np.inf)
        steps = np.zeros(len(replies), np.int64)
        for index, reply in enumerate(replies):
            if reply.update is not None:
                is_complete = self._is_complete(run, reply.update)
                arrival[index] = reply.arrival if is_complete else np.inf
                steps[index] = reply.update.steps
            elif reply.outcome.startswith(DROPPED):
                dropout[index] = reply.arrival
        result = close_round(
            run.settings.rules,
            arrival,
            steps,
            dropout,
            target_updates=run.target_updates,
            round_seconds=round_seconds,
            deadline=max([round_seconds, *(reply.arrival for reply in self.replies.values())]),
        )
        return [  # a reason says more than an outcome
            TaskOutcome(outcome).name.lower() if reply.outcome in ("", LATE) else reply.outcome
            for reply, outcome in zip(replies, result.outcomes, strict=True)
        ]

    def _is_complete(self, run: Run, update: Update) -> bool:
        """Return whether a device did all its steps, or all that it wanted to."""
        steps = len(self.requests[update.device].manifest.batch_sizes)
        return update.steps == steps or run.context.open_passes > 0
