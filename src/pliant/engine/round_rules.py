"""The rules of a round: its devices, its deadline, which updates count, when the round closes."""

import math
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pliant.devices.vector_rng import FloatArray, IntArray, sample_uniforms
from pliant.engine.event_queue import Event, EventKind, EventQueue
from pliant.value import Fraction, NonNegative, Value

NO_ROW_FITS = "no row fits in memory"


class TaskOutcome(IntEnum):
    """How a task ended; each task has exactly one outcome."""

    FINISHED = 0  # all mini-batches, in time
    PARTIAL = 1  # the steps done by the deadline were sent
    LATE = 2  # nothing arrived in time
    DROPPED = 3  # the device left
    SURPLUS = 4  # enough other updates came first
    VOID = 5  # in time, but the round had too few updates
    DECLINED = 6  # no row of the method fits in the device's memory

    @property
    def label(self) -> str:
        """Return the outcome as records have it."""
        is_declined = self is TaskOutcome.DECLINED
        return f"dropped: declined, {NO_ROW_FITS}" if is_declined else self.name.lower()


class RoundRules(Value, frozen=True):
    """How the server handles devices that are late, leave or are too few, whatever the method.

    `late` applies to a device that is not done at the deadline: `discard` loses its work, `partial`
    sends the steps done so far, `wait` keeps the round open until all are done. `grace` is the
    tolerance of the deadline, as a share of the round: devices plan without it, but work on and
    send until it is over. `changes` says when speeds change: at any time, or only between
    mini-batches. `cost` says how long a mini-batch takes: by the MACs of the subnet drawn, or by
    those that its row of the table leads to expect. `over_selection` selects this share
    of extra devices; the first updates to arrive count. `quorum` is the share of the target number
    of updates below which a round is void; rejected updates do not count. `dropout` is the
    probability that a device leaves during the round. `close_early` closes the round as soon as the
    target is reached.

    >>> from pliant.engine.round_rules import RoundRules
    >>> RoundRules(late="partial", over_selection=0.3).selection_size(10)
    13
    """

    late: Literal["discard", "partial", "wait"] = "discard"
    grace: NonNegative = 0.03
    changes: Literal["anytime", "batch"] = "anytime"
    cost: Literal["realised", "expected"] = "realised"
    over_selection: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    quorum: Fraction = 0.0
    dropout: Fraction = 0.0
    close_early: bool = False

    def selection_size(self, target_updates: int) -> int:
        """Return how many devices to select to get this many updates."""
        return math.ceil(target_updates * (1 + self.over_selection) - 1e-9)

    def quorum_size(self, target_updates: int) -> int:
        """Return the fewest updates for a valid round with this target."""
        return math.ceil(self.quorum * target_updates - 1e-9)

    @property
    def closes_at_target(self) -> bool:
        """Return whether a round ends as soon as the target is reached."""
        return self.close_early or self.late == "wait"


class RoundClosure(NamedTuple):
    """How a round ended: each task's outcome and arrival time, and when the round closed."""

    outcomes: NDArray[np.int8]
    arrival: FloatArray  # infinity if no update arrived
    closed_at: float


def sample_dropout_times(
    rules: RoundRules, devices: IntArray, *, seed: int, round: int, round_seconds: float
) -> FloatArray:
    """Return when each device leaves, in seconds from the round's start; infinity if it stays."""
    if not rules.dropout:
        return np.full(len(devices), np.inf)
    chance, fraction = sample_uniforms(seed, ("departure",), devices, round)
    return np.where(chance < rules.dropout, fraction * round_seconds, np.inf)


def close_round(
    rules: RoundRules,
    arrival: FloatArray,
    steps_done: IntArray,
    dropout_times: FloatArray,
    *,
    target_updates: int,
    round_seconds: float,
    deadline: float,
    closes_at: float = math.inf,
) -> RoundClosure:
    """Decide the outcome of each task and the end of the round, event by event.

    `arrival` is when a complete update would arrive (infinity: never); `steps_done` counts the
    mini-batches that a device has done by the deadline. If fewer devices than `target_updates` were
    selected, the target is reached when all of them have answered; the quorum stays the same.
    At `closes_at` the server closes the round, if it is still open.
    """
    has_left = dropout_times < np.minimum(arrival, deadline)
    is_partial = (rules.late == "partial") & (steps_done > 0) & np.isinf(arrival)
    in_time = (np.isfinite(arrival) | is_partial) & ~has_left
    arrival = np.where(in_time, np.minimum(arrival, deadline), np.inf)
    queue = EventQueue(
        [
            *_make_events(EventKind.DEPARTURE, dropout_times, has_left),
            *_make_events(EventKind.ARRIVAL, arrival, in_time),
            Event(round_seconds, EventKind.ROUND_END),
            Event(min(deadline, closes_at), EventKind.DEADLINE),
        ]
    )
    merged, dropped = _wait_for_updates(rules, queue, len(arrival), target_updates)
    closed_at = queue.now
    # a device that is not done when the round closes early could not be late
    unfinished = TaskOutcome.SURPLUS if closed_at < deadline else TaskOutcome.LATE
    # as numbers: numpy takes long to convert an enum
    outcomes = np.where(in_time, TaskOutcome.SURPLUS.value, unfinished.value).astype(np.int8)
    if dropped:
        outcomes[dropped] = TaskOutcome.DROPPED.value
    partial, finished = TaskOutcome.PARTIAL.value, TaskOutcome.FINISHED.value
    outcomes[merged] = np.where(is_partial[merged], partial, finished)
    if len(merged) < rules.quorum_size(target_updates):
        outcomes[merged] = TaskOutcome.VOID.value
    return RoundClosure(outcomes, arrival, closed_at)


def _make_events(kind: EventKind, times: FloatArray, is_due: NDArray[np.bool_]) -> list[Event]:
    due = np.flatnonzero(is_due)
    pairs = zip(times[due].tolist(), due.tolist(), strict=True)
    return [Event(time, kind, index) for time, index in pairs]


def _wait_for_updates(
    rules: RoundRules, queue: EventQueue, num_tasks: int, target_updates: int
) -> tuple[list[int], list[int]]:
    """Let time pass until the round closes; return whose updates count and who has left."""
    merged: list[int] = []
    dropped: list[int] = []
    target, is_over = min(target_updates, num_tasks), False
    while True:
        event = queue.pop()
        match event.kind:
            case EventKind.DEADLINE:
                return merged, dropped
            case EventKind.ROUND_END:
                is_over = True
            case EventKind.DEPARTURE:
                dropped.append(event.device)
            case EventKind.ARRIVAL if len(merged) < target:
                merged.append(event.device)
        if 0 < len(merged) == target and (is_over or rules.closes_at_target):
            return merged, dropped
        has_answers = len(merged) + len(dropped) == num_tasks  # a waiting server sees devices leave
        if has_answers and (rules.late == "wait" if num_tasks else is_over):
            return merged, dropped
