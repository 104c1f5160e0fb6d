"""Pace training on a live device, by its own clock or by the simulated fleet.

Half of the filters cost a quarter of the MACs but half of the time. A curve of seconds over MACs,
measured on the device, therefore converts the time left into the MACs that a policy works with.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from pliant.deploy.messages import TrainRequest
from pliant.deploy.step_times import StepTimeCurve
from pliant.devices import BudgetPolicy, DeviceStatus, FixedChoice, PerBatch, RowChoice
from pliant.devices.budget import BoolArray
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.round_rules import NO_ROW_FITS
from pliant.engine.round_tasks import LocalWork, RoundTasks
from pliant.engine.task_costs import find_fitting_rows
from pliant.engine.timetable import Timetable, build_timetable, compute_start_status
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.config import Experiment
from pliant.methods.base import TaskKey

SLOWDOWN_WINDOW = 3  # mini-batches; their median is the slowdown, so one outlier changes nothing
RESERVE = 0.05  # share of the round kept back for the unforeseen


@dataclass
class MeasuredPacer:
    """Choose the cost of each mini-batch from how long the previous ones took.

    `times` holds the start of each mini-batch and the end of the last one, in seconds since the
    request arrived; `slowdown` is how much longer they take than the curve says.
    """

    policy: BudgetPolicy
    work: LocalWork
    curve: StepTimeCurve
    seconds: float
    clock: Callable[[], float]  # seconds since the request arrived
    grace: float = 0.0  # further seconds in which work is still accepted
    cpu_clock: Callable[[], float] = time.process_time
    server_choice: tuple[int, float] | None = None
    slowdown: float = 1.0
    is_partial: bool = False
    open_passes: int = 0  # above 0: the device stops by itself when the next step does not fit
    cpu_share: float = 1.0
    sleep: Callable[[float], None] = lambda seconds: None

    def __post_init__(self) -> None:
        if isinstance(self.policy, PerBatch) and not self.open_passes:
            # divide the time left among the remaining steps: fixed slots let a device fall behind
            self.policy = replace(self.policy, budget="paced")
        self._end = self.seconds * (1 - RESERVE)
        self._ratios: deque[float] = deque(maxlen=SLOWDOWN_WINDOW)
        self.times: list[float] = []
        self._cpu_times: list[float] = []  # CPU time at the start of each mini-batch
        self.rows: list[int] = []
        self.macs: list[float] = []
        self.short = 0  # mini-batches for which even the smallest row was too expensive

    def choose(self, step: int) -> tuple[int, float] | None:
        """Return the row and the expected MACs of a mini-batch; None when the round is over."""
        if step:
            self._observe_step(step - 1)
        now = self.clock()
        self.times.append(now)
        self._cpu_times.append(self.cpu_clock())
        if step == len(self.work.sizes):
            return None
        row, macs = self._choose_row(step, now)
        stops = self.is_partial or self.open_passes
        needed = self._estimate_seconds(step, macs) if stops else 0.0
        is_lost_if_late = self.open_passes and not self.is_partial
        if now + needed > (self._end if is_lost_if_late else self.seconds + self.grace):
            return None  # it could not finish in time
        self.rows.append(row)
        self.macs.append(macs)
        return row, macs

    def refine_curve(self) -> StepTimeCurve:
        """Return the curve corrected by this round's CPU times (other programs do not count)."""
        elapsed = np.diff(self._cpu_times)
        sizes = self.work.sizes[: len(elapsed)]
        shares = [m / (self.work.full_macs * n) for m, n in zip(self.macs, sizes, strict=False)]
        return self.curve.refine(shares, elapsed * self.work.sizes[0] / sizes)

    def _choose_row(self, step: int, now: float) -> tuple[int, float]:
        full_macs = self.work.full_macs * self.work.sizes[step]
        if self.server_choice is not None:
            row, first_macs = self.server_choice
            share = first_macs / (self.work.full_macs * self.work.sizes[0])
            return row, first_macs if step == 0 else share * full_macs
        macs_left = self.work.macs_left(step)
        time_left = max(self._end - now, 1e-9)
        one_pass = self.work.macs_left(0) / max(1, self.open_passes)
        if self.open_passes:  # as if one pass filled the round
            slot = self._end * full_macs / one_pass
        else:
            slot = time_left * full_macs / macs_left
        batch_share = self.work.sizes[step] / self.work.sizes[0]
        share = self.curve.scale(self.slowdown).share_within(slot / batch_share)
        status = DeviceStatus(
            np.zeros(1, np.int64),
            step,
            np.full(1, now),
            np.full(1, share * full_macs / slot),
            np.full(1, time_left),
            self._end,
            np.full(1, full_macs),
            np.full(1, macs_left),
            np.full(1, one_pass),
        )
        choice = self.policy.choose(status)
        self.short += bool(choice.is_short is not None and choice.is_short[0])
        return int(choice.row[0]), float(choice.macs[0])

    def _estimate_seconds(self, step: int, macs: float) -> float:
        batch_share = self.work.sizes[step] / self.work.sizes[0]
        share = macs / (self.work.full_macs * self.work.sizes[step])
        return self.curve.seconds_for(share) * batch_share * self.slowdown

    def _observe_step(self, step: int) -> None:
        """Update the slowdown after a step, and sleep if the owner allows only part of a core."""
        elapsed = self.clock() - self.times[step]
        if self.cpu_share < 1.0:
            self.sleep(elapsed * (1 / self.cpu_share - 1))
            elapsed = self.clock() - self.times[step]
        expected = self._estimate_seconds(step, self.macs[step]) / self.slowdown
        self._ratios.append(elapsed / expected)
        if len(self._ratios) == SLOWDOWN_WINDOW:
            self.slowdown = median(self._ratios)


def explain_refusal(
    context: WorkerContext, experiment: Experiment, request: TrainRequest
) -> str | None:
    """Return why a device with the memory of the fleet's file cannot train; None if it can."""
    fits = _find_fitting_rows(context, experiment, request)
    return None if fits is None or fits.any() else NO_ROW_FITS


def _find_fitting_rows(
    context: WorkerContext, experiment: Experiment, request: TrainRequest
) -> BoolArray | None:
    devices = np.array([request.device])
    costs = experiment.fleet.get_costs(devices, seed=experiment.seed)
    return find_fitting_rows(context, costs, devices)


class SimulatedPacer:
    """Pace a real device by the experiment's simulated fleet instead of its own clock.

    The device computes its own part of the simulator's timetable, so a federation of real processes
    matches the simulation bit for bit; only the times are real. In an asynchronous run, whose time
    the server keeps, it follows the server's plan instead.
    """

    def __init__(
        self,
        context: WorkerContext,
        experiment: Experiment,
        request: TrainRequest,
        work: LocalWork,
        clock: Callable[[], float],
    ) -> None:
        self._steps, self.short = request.steps, 0
        if not request.steps:
            timetable = _build_timetable(context, experiment, request, work)
            used = int(timetable.used_steps[0])
            columns = timetable.row[0, :used], timetable.planned[0, :used]
            self._steps = tuple(zip(*(column.tolist() for column in columns), strict=True))
            self.short = int(timetable.is_short[0, :used].sum())
        self._clock = clock
        self.times: list[float] = []
        self.rows: list[int] = []

    def choose(self, step: int) -> tuple[int, float] | None:
        self.times.append(self._clock())
        if step == len(self._steps):
            return None
        self.rows.append(self._steps[step][0])
        return self._steps[step]


def _build_timetable(
    context: WorkerContext, experiment: Experiment, request: TrainRequest, work: LocalWork
) -> Timetable:
    """Return the device's part of a round's timetable."""
    key = TaskKey(experiment.seed, request.round, request.device)
    full_macs = np.array([work.sizes], np.float64) * work.full_macs
    zero = np.zeros(1)
    fits = _find_fitting_rows(context, experiment, request)
    devices = np.array([request.device])
    tasks = RoundTasks(devices, full_macs, zero, zero, fits, context.open_passes)

    def count_macs(devices: IntArray, step: int, choice: RowChoice) -> FloatArray:
        if not len(devices):  # its time is over
            return np.zeros(0)
        macs = context.batch_macs(int(choice.row[0]), work.sizes[step], key, step)
        return np.full(len(devices), macs)

    policy = context.limit_budget(request.last_row)
    fleet, seed = experiment.fleet, experiment.seed
    start = request.round * fleet.round_seconds
    if request.row is not None:
        status = compute_start_status(fleet, tasks, seed=seed, start=start)
        choice = RowChoice(np.array([request.row]), np.array([request.macs]))
        policy = FixedChoice(status, choice)
    return build_timetable(
        fleet,
        policy,
        tasks,
        experiment.rules,
        seed=seed,
        round=request.round,
        start=start,
        step_cost=count_macs,
    )
