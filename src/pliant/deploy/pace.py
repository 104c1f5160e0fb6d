"""The live device's controller: it measures its mini-batches and chooses what fits the time left.

Half of the filters cost a quarter of the MACs but half of the time, so a curve of seconds over
MACs, measured on the device, turns the time that is left into MACs that the plan understands.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from pliant.deploy.curve import Curve
from pliant.devices import Moment, PerBatch, Plan
from pliant.methods.base import Local

MEMORY = 3  # mini-batches whose median is the slowdown: one outlier changes nothing
RESERVE = 0.05  # of the round, for what cannot be foreseen at its end


@dataclass(frozen=True, eq=False)
class Work:
    """The mini-batches of one order: samples of each, and MACs of one sample at full width."""

    sizes: tuple[int, ...]
    full: float

    def left(self, step: int) -> float:
        """Return the full MACs of a step and of all behind it."""
        return self.full * sum(self.sizes[step:])


def work_of(samples: int, local: Local, full: float) -> Work:
    """Return the mini-batches of a device that has so many samples."""
    whole, rest = divmod(samples, local.batch)
    once = [local.batch] * whole + ([rest] if rest else [])
    return Work(tuple(once * local.epochs), full)


class LivePace:
    """Choose what each mini-batch may cost, from what those before it have taken.

    `times` is when each mini-batch began and the last one ended, in seconds since the order came;
    `slowdown` is how much longer they take than the curve says.
    """

    def __init__(
        self,
        plan: Plan,
        work: Work,
        curve: Curve,
        *,
        seconds: float,
        clock: Callable[[], float],  # seconds since the order came
        cpu: Callable[[], float] = time.process_time,
        held: tuple[int, float] | None = None,
        slowdown: float = 1.0,
        is_partial: bool = False,
        share: float = 1.0,
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        # a real device always shares out the time that is left: a fixed slot lets it fall behind
        self._plan = replace(plan, budget="paced") if isinstance(plan, PerBatch) else plan
        self._work = work
        self._curve = curve
        self._end = seconds * (1 - RESERVE)
        self._seconds = seconds
        self._clock = clock
        self._cpu = cpu
        self._held = held
        self._ratios: deque[float] = deque(maxlen=MEMORY)
        self._is_partial = is_partial
        self._share = share
        self._sleep = sleep
        self.slowdown = slowdown
        self.times: list[float] = []
        self._spent: list[float] = []  # of the CPU until each mini-batch
        self.rows: list[int] = []
        self.macs: list[float] = []
        self.short = 0  # mini-batches for which even the smallest row was too much

    def choose(self, step: int) -> tuple[int, float] | None:
        """Return the row and the expected MACs of a mini-batch; None when the round is over."""
        if step:
            self._heard(step - 1)
        now = self._clock()
        self.times.append(now)
        self._spent.append(self._cpu())
        if step == len(self._work.sizes):
            return None
        row, macs = self._chosen(step, now)
        wanted = self._expected(step, macs) if self._is_partial else 0.0
        if now + wanted > self._seconds:  # what cannot end in time is not begun
            return None
        self.rows.append(row)
        self.macs.append(macs)
        return row, macs

    def learnt(self) -> Curve:
        """Return the curve as this round corrects it, by CPU time: other programs do not matter."""
        took = np.diff(self._spent)
        sizes = self._work.sizes[: len(took)]
        shares = [m / (self._work.full * n) for m, n in zip(self.macs, sizes, strict=False)]
        return self._curve.refined(shares, took * self._work.sizes[0] / sizes)

    def _chosen(self, step: int, now: float) -> tuple[int, float]:
        full = self._work.full * self._work.sizes[step]
        if self._held is not None:
            row, first = self._held
            share = first / (self._work.full * self._work.sizes[0])
            return row, first if step == 0 else share * full
        left = self._work.left(step)
        time_left = max(self._end - now, 1e-9)
        slot = time_left * full / left
        part = self._work.sizes[step] / self._work.sizes[0]
        share = self._curve.slowed(self.slowdown).within(slot / part)
        moment = Moment(
            np.zeros(1, np.int64),
            step,
            np.full(1, now),
            np.full(1, share * full / slot),
            np.full(1, time_left),
            self._end,
            np.full(1, full),
            np.full(1, left),
            np.full(1, self._work.left(0)),
        )
        choice = self._plan.choose(moment)
        self.short += bool(choice.is_short is not None and choice.is_short[0])
        return int(choice.row[0]), float(choice.macs[0])

    def _expected(self, step: int, macs: float) -> float:
        """Return the seconds that a step should take."""
        part = self._work.sizes[step] / self._work.sizes[0]
        share = macs / (self._work.full * self._work.sizes[step])
        return self._curve.at(share) * part * self.slowdown

    def _heard(self, step: int) -> None:
        """Learn from the step that has just ended, and rest if the user allows only a share."""
        took = self._clock() - self.times[step]
        if self._share < 1.0:
            self._sleep(took * (1 / self._share - 1))
            took = self._clock() - self.times[step]
        calm = self._expected(step, self.macs[step]) / self.slowdown
        self._ratios.append(took / calm)
        if len(self._ratios) == MEMORY:
            self.slowdown = median(self._ratios)
