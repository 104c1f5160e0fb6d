"""Rounds on real devices: requests out, replies in, and a deadline that holds whatever they do."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from pliant.data.declared import DeclaredData
from pliant.deploy.messages import AnyMessage, encode_for_devices
from pliant.deploy.server.declarations import DeclarationReader
from pliant.deploy.server.device_tests import score_on_devices
from pliant.deploy.server.presence import LOOK_SECONDS, PresenceWriter
from pliant.deploy.server.replies import (
    DROPPED,
    LATE,
    CheckedReply,
    MessageTransport,
    RawReply,
    SentRequest,
    check_reply,
    make_task_record,
)
from pliant.deploy.server.reply_store import ReplyStore
from pliant.deploy.server.requests import Requester, TaskOrder
from pliant.deploy.settings import MAX_WAIT_ROUNDS, ServerSettings
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.device_scores import DeviceScores
from pliant.engine.ledger import MERGED_OUTCOMES
from pliant.engine.round_loop import RoundResult, Run
from pliant.engine.round_rules import TaskOutcome, close_round
from pliant.engine.run_store import RunState, RunStore
from pliant.engine.selection import select_devices
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.config import Experiment
from pliant.methods.aggregation import UpdateStream
from pliant.methods.base import TaskKey, Update
from pliant.methods.state import init_server_state
from pliant.params import get_params
from pliant.rng import rng_stream

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class MergedRound:
    """What the server keeps of a device: the last round of which it merged an update."""

    merged: int


class NotEnoughDevices(RuntimeError):
    """Too few devices are online, or too many consecutive rounds merged no update."""


def make_run(
    experiment: Experiment,
    context: WorkerContext,
    store: RunStore | None = None,
    secret_seed: int | None = None,
) -> Run:
    """Start or resume a run on real devices; it saves every round, so no merged update is lost."""
    initial = init_server_state(context.method, get_params(context.net.module))
    state = store.resume(type(initial), MergedRound) if store else None
    state = state or RunState(0, 0.0, initial, {})
    if isinstance(context.data, DeclaredData):  # one dictionary, which every checkpoint has
        context.data.declarations.update(state.declarations)
        state = replace(state, declarations=context.data.declarations)
    settings = msgspec.structs.replace(experiment.settings, checkpoint_every=1)
    return Run(
        context,
        experiment.fleet,
        settings,
        state,
        repeats_empty_rounds=True,
        secret_seed=secret_seed,
    )


@dataclass
class DeviceTransport:
    """The transport of a run on real devices, over any way to carry messages."""

    experiment: Experiment
    settings: ServerSettings
    messages: MessageTransport
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    presence: PresenceWriter | None = None  # for those who watch the run
    store: ReplyStore = field(default_factory=ReplyStore)

    def __post_init__(self) -> None:
        self._config = encode_for_devices(self.experiment, self.settings.pace)
        self.requester = Requester(self._config, self.settings.pace, self.messages)
        self._declarations = DeclarationReader(self.experiment.server.max_samples)
        self._has_started = False  # this process has run a round
        self._population = 0  # devices online when the round's were drawn
        self._opened_at = self._sent_at = 0.0
        self.requests: dict[int, SentRequest] = {}  # of the current round
        self.replies: dict[int, CheckedReply] = {}

    def select(self, run: Run) -> list[int]:
        """Wait for devices and select among them; if all are online, as the simulator does."""
        self._opened_at = self.clock()
        fleet, settings, history = run.fleet, run.settings, run.state.history
        target = min(settings.rules.selection_size(run.target_updates), fleet.size)
        quorum = max(1, min(target, settings.rules.quorum_size(run.target_updates)))
        online = self._wait_for_devices(run, target, quorum)
        self._has_started, self._population = True, len(online)
        selection, number = settings.select, run.state.next_round
        if isinstance(selection, str) and len(online) < fleet.size:
            rng, count = rng_stream(run.drawing_seed, "select", number), min(target, len(online))
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
            seed=run.drawing_seed,
            round=number,
            speeds=estimate_speeds,
            history=history,
        )
        return [int(device) for device in devices]

    def _wait_for_devices(self, run: Run, target: int, quorum: int) -> list[int]:
        while True:
            online = self.find_ready_devices(run)
            waited, count = self.clock() - self._opened_at, len(online)
            is_late = waited > self.settings.patience
            may_start = is_late or (self._has_started and waited > self.settings.allowance)
            if count >= target or (may_start and count >= quorum):
                return online
            if is_late:
                text = f"expected {quorum} or more devices online, got {count}"
                raise NotEnoughDevices("; ".join([text, *self.problems]))
            self.sleep(POLL_SECONDS)

    @property
    def problems(self) -> list[str]:
        """Return why devices are left out that are online."""
        return list(self._declarations.problems.values())

    def find_ready_devices(self, run: Run) -> list[int]:
        """Return the devices that are online and, if they keep their data, have declared it."""
        online = {d for d in self.messages.find_online_devices() if 0 <= d < run.fleet.size}
        if isinstance(run.context.data, DeclaredData):
            self._declarations.read_hellos(run, sorted(online), self.messages.hello_replies)
            online &= run.context.data.declarations.keys()
        if self.presence is not None:
            self.presence.note_online(online)
        return sorted(online)

    def dispatch(self, run: Run, devices: list[int]) -> None:
        """Send each device its request."""
        raw_requests = self.prepare(run, devices)
        self.messages.send(raw_requests, round=run.state.next_round, seconds=self._window(run))

    def prepare(self, run: Run, devices: list[int]) -> dict[int, AnyMessage]:
        """Start a round: return the encoded request of each device."""
        self.store.clear()
        self.requests, self.replies = self._make_requests(run, devices), {}
        self._sent_at = self.clock()
        return {device: request.raw for device, request in self.requests.items()}

    def collect(self, run: Run) -> RoundResult:
        """Collect replies until all or enough are in, or the deadline passes."""
        rules, window = run.settings.rules, self._window(run)
        looked_at = self.clock()
        while len(self.replies) < len(self.requests) and self._elapsed < window:
            if self.clock() - looked_at >= LOOK_SECONDS:
                self.find_ready_devices(run)  # greets those that join, and notes who is online
                looked_at = self.clock()
            for message in self.messages.poll_replies():
                self.receive(run, message)
            updates = [reply for reply in self.replies.values() if reply.update]
            mergeable = [r for r in updates if rules.late == "partial" or is_complete(run, r)]
            if rules.closes_at_target and len(mergeable) >= run.target_updates:
                break
            if len(self.replies) < len(self.requests):
                self.sleep(POLL_SECONDS)
        return self.close(run)

    def test_network(self, run: Run) -> DeviceScores | None:
        """Let the devices that are online test the network on their own images."""
        seconds = run.fleet.round_seconds + self.settings.allowance
        end = self.clock() + seconds

        def wait() -> bool:
            self.sleep(POLL_SECONDS)
            return self.clock() < end

        devices = self.find_ready_devices(run)
        return score_on_devices(run, self.messages, devices, self._config, seconds, wait)

    def receive(self, run: Run, message: RawReply) -> None:
        """Validate one reply."""
        reply = check_reply(run, self.requests[message.device], message, self._elapsed)
        if _merges_stream(run):
            reply = self.store.keep(message, reply)
        self.replies[message.device] = reply
        if self.presence is not None:
            self.presence.note_reply(message.device, reply.battery)
        if reply.curve is not None:
            self.requester.curves[message.device] = reply.curve

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
            make_task_record(
                run, self.requests[reply.device], reply, outcome, *times, messages=self.messages
            )
            for reply, outcome in results
        ]
        start = run.state.seconds
        server_state = self._merge(run, updates) if _merges_stream(run) else None
        return RoundResult(
            updates,
            tasks,
            start + (closed_at - self._opened_at),
            {update.device: MergedRound(number) for update in updates},
            start + waited,
            server_state=server_state,
            population=self._population,
        )

    def _merge(self, run: Run, updates: list[Update]) -> Any:
        """Return the server's state after updates whose tensors are in the store."""
        requests = [self.requests[update.device] for update in updates]
        arrivals = {device: reply.arrival for device, reply in self.replies.items()}
        stream = UpdateStream(updates, self.store.iter_updates(run, requests, arrivals))
        state = run.merge(stream)
        self.store.clear()
        return state

    @property
    def _elapsed(self) -> float:
        return self.clock() - self._sent_at

    def _window(self, run: Run) -> float:
        """Return how long the server waits for replies."""
        seconds, rules = run.fleet.round_seconds, run.settings.rules
        if rules.late == "wait":
            return seconds * MAX_WAIT_ROUNDS + self.settings.allowance
        return seconds * (1 + rules.grace) + self.settings.allowance

    def _make_requests(self, run: Run, devices: list[int]) -> dict[int, SentRequest]:
        """Return for each device its encoded request and what a valid reply to it looks like."""
        shared, number, last_row = run.shared_params, run.state.next_round, run.last_row
        choices = self.requester.choose_rows(run, devices)
        is_waiting = run.settings.rules.late == "wait"
        seconds = self._window(run) if is_waiting else run.fleet.round_seconds
        requests = {}
        for device in devices:
            order = TaskOrder(
                TaskKey(run.settings.seed, number, device), run.compute_lr(device), last_row
            )
            if device in choices:
                order = replace(order, row=choices[device][0], macs=choices[device][1])
            requests[device] = self.requester.make_request(run, order, shared, seconds)
        return requests

    def _decide_outcomes(self, run: Run, replies: list[CheckedReply]) -> list[str]:
        """Apply the round rules to the replies and return how each task ended."""
        round_seconds = run.fleet.round_seconds + self.settings.allowance
        arrival, dropout = np.full((2, len(replies)), np.inf)
        steps = np.zeros(len(replies), np.int64)
        for index, reply in enumerate(replies):
            if reply.update is not None:
                arrival[index] = reply.arrival if is_complete(run, reply) else np.inf
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


def _merges_stream(run: Run) -> bool:
    """Return whether updates are merged one by one, and not needed together after that."""
    context = run.context
    is_kept = context.data.test_shares or context.distiller is not None
    return context.merges_stream and not is_kept


def is_complete(run: Run, reply: CheckedReply) -> bool:
    """Return whether a device did all its steps, or all that it wanted to."""
    steps = 0 if reply.update is None else reply.update.steps
    return steps == len(reply.batch_sizes) or run.context.open_passes > 0
