"""The rules of a round: what the deadline means, whose update counts, when the round closes."""

import math
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pliant.devices.draws import FloatArray, IntArray, uniforms
from pliant.value import Fraction, NonNegative, Value


class End(IntEnum):
    """How a task ended; every dispatched task has exactly one end."""

    FINISHED = 0  # all mini-batches, in time
    PARTIAL = 1  # what was done at the deadline was sent
    LATE = 2  # nothing arrived in time
    DROPPED = 3  # the device left
    SURPLUS = 4  # enough others were in before
    VOID = 5  # in time, but the round had too few


class Rules(Value, frozen=True):
    """What a server does about devices that are late, leave or are too few, whatever the method.

    `late` is for a device that is not ready at the deadline: `discard` (late is lost), `partial`
    (what is done is sent), `wait` (the round lasts until all are ready). `grace` moves the deadline
    by this share of the round, unknown to the devices. `over` selects that share of devices more
    than wanted, of which the first ones in count. `quorum` is the share of those wanted below which
    a round is void; an update that the guard refuses does not count towards it. `dropout` is the
    probability that a device leaves, at some moment of the round. `early` closes the round when the
    last wanted update is in.

    >>> from pliant.engine.rules import Rules
    >>> Rules(late="partial", over=0.3).selected(10)
    13
    """

    late: Literal["discard", "partial", "wait"] = "discard"
    grace: NonNegative = 0.0
    over: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    quorum: Fraction = 0.0
    dropout: Fraction = 0.0
    early: bool = False

    def selected(self, wanted: int) -> int:
        """Return how many devices to select when this many updates are wanted."""
        return math.ceil(wanted * (1 + self.over) - 1e-9)

    def needed(self, wanted: int) -> int:
        """Return how many updates make a round, when this many are wanted."""
        return math.ceil(self.quorum * wanted - 1e-9)

    @property
    def closes_early(self) -> bool:
        """Return whether a round ends as soon as the wanted updates are in."""
        return self.early or self.late == "wait"


class Verdict(NamedTuple):
    """How a round ended: each task's end, when its update came in, and when the round closed."""

    ends: NDArray[np.int8]
    arrival: FloatArray  # infinity where nothing came in
    close: float


def departures(
    rules: Rules, devices: IntArray, *, seed: int, round: int, length: float
) -> FloatArray:
    """Return when each device leaves, counted from the round's start; infinity if it stays."""
    if not rules.dropout:
        return np.full(len(devices), np.inf)
    chance, moment = uniforms(seed, ("departure",), devices, round)
    return np.where(chance < rules.dropout, moment * length, np.inf)


def judge(
    rules: Rules,
    arrival: FloatArray,
    done: IntArray,
    leaves: FloatArray,
    *,
    wanted: int,
    length: float,
    deadline: float,
) -> Verdict:
    """Return each task's end and the round's.

    `arrival` is when a complete update would be in (infinity: never); `done` counts the
    mini-batches that a device has ready at the deadline.
    """
    has_left = leaves < np.minimum(arrival, deadline)
    can_send = (rules.late == "partial") & (done > 0) & np.isinf(arrival)
    ends = np.where(np.isfinite(arrival), End.FINISHED, np.where(can_send, End.PARTIAL, End.LATE))
    ends = np.where(has_left, End.DROPPED, ends).astype(np.int8)
    counts = (ends == End.FINISHED) | (ends == End.PARTIAL)
    arrival = np.where(counts, np.minimum(arrival, deadline), np.inf)

    order = np.argsort(arrival, kind="stable")
    counted = order[: min(wanted, int(counts.sum()))]
    surplus = order[len(counted) : int(counts.sum())]
    ends[surplus] = End.SURPLUS
    if len(counted) < rules.needed(wanted):
        ends[counted] = End.VOID
    last = float(arrival[counted[-1]]) if len(counted) else 0.0
    close = deadline
    if len(counted) == wanted:
        close = last if rules.closes_early else max(length, last)
    elif rules.late == "wait" and not (ends == End.LATE).any():
        # a server that waits sees who leaves
        close = max(last, float(leaves[ends == End.DROPPED].max(initial=0.0)))
    if len(counted) == wanted and close < deadline:
        is_open = leaves > close
        is_open[counted] = False
        ends[is_open] = End.SURPLUS  # the round closed before they could be late
    return Verdict(ends, arrival, close)
