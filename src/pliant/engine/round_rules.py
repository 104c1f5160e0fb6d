"""The rules of a round: its devices, its deadline, which updates count, when the round closes."""

import math
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pliant.devices.vector_rng import FloatArray, IntArray, sample_uniforms
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
) -> RoundClosure:
    """Decide the outcome of each task and the end of the round.

    `arrival` is when a complete update would arrive (infinity: never); `steps_done` counts the
    mini-batches that a device has done by the deadline. If fewer devices than `target_updates` were
    selected, the target is reached when all of them have answered; the quorum stays the same.
    """
    has_left = dropout_times < np.minimum(arrival, deadline)
    can_send = (rules.late == "partial") & (steps_done > 0) & np.isinf(arrival)
    outcomes = np.where(
        np.isfinite(arrival),
        TaskOutcome.FINISHED,
        np.where(can_send, TaskOutcome.PARTIAL, TaskOutcome.LATE),
    )
    outcomes = np.where(has_left, TaskOutcome.DROPPED, outcomes).astype(np.int8)
    in_time = (outcomes == TaskOutcome.FINISHED) | (outcomes == TaskOutcome.PARTIAL)
    arrival = np.where(in_time, np.minimum(arrival, deadline), np.inf)

    order = np.argsort(arrival, kind="stable")
    merged = order[: min(target_updates, int(in_time.sum()))]
    surplus = order[len(merged) : int(in_time.sum())]
    outcomes[surplus] = TaskOutcome.SURPLUS
    if len(merged) < rules.quorum_size(target_updates):
        outcomes[merged] = TaskOutcome.VOID
    last_arrival = float(arrival[merged[-1]]) if len(merged) else 0.0
    closed_at = deadline
    is_target_reached = 0 < len(merged) == min(target_updates, len(arrival))
    if is_target_reached:
        closed_at = last_arrival if rules.closes_at_target else max(round_seconds, last_arrival)
    elif rules.late == "wait" and len(arrival) and not (outcomes == TaskOutcome.LATE).any():
        # a waiting server sees devices leave
        departures = dropout_times[outcomes == TaskOutcome.DROPPED]
        closed_at = max(last_arrival, float(departures.max(initial=0.0)))
    elif not len(arrival):  # there is nobody to wait for
        closed_at = round_seconds
    if is_target_reached and closed_at < deadline:
        is_open = dropout_times > closed_at
        is_open[merged] = False
        outcomes[is_open] = TaskOutcome.SURPLUS  # the round closed before they could be late
    return RoundClosure(outcomes, arrival, closed_at)
