"""Pace a real device by the experiment's simulated fleet instead of its own clock.

The device computes its own part of the simulator's timetable, so a federation of real processes
matches the simulation bit for bit.
"""

from collections.abc import Callable

import numpy as np

from pliant.deploy.messages import TrainRequest
from pliant.devices import FixedChoice, RowChoice
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.local_work import LocalWork, WorkerContext
from pliant.engine.timetable import RoundTasks, build_timetable, compute_start_status
from pliant.experiment.config import Experiment
from pliant.methods.base import TaskKey


class SimulatedPacer:
    """Make the simulator's choices; only the times are real."""

    def __init__(
        self,
        context: WorkerContext,
        experiment: Experiment,
        request: TrainRequest,
        work: LocalWork,
        clock: Callable[[], float],
    ) -> None:
        key = TaskKey(experiment.seed, request.round, request.device)
        full_macs = np.array([work.sizes], np.float64) * work.full_macs
        zero = np.zeros(1)
        tasks = RoundTasks(np.array([request.device]), full_macs, zero, zero)

        def count_macs(devices: IntArray, step: int, choice: RowChoice) -> FloatArray:
            if not len(devices):  # its time is over
                return np.zeros(0)
            macs = context.step_macs(int(choice.row[0]), key, step)
            return np.full(len(devices), work.sizes[step] * macs)

        policy, fleet, seed = context.budget_policy, experiment.fleet, experiment.seed
        start = request.round * fleet.round_seconds
        if request.row is not None:
            status = compute_start_status(fleet, tasks, seed=seed, start=start)
            choice = RowChoice(np.array([request.row]), np.array([request.macs]))
            policy = FixedChoice(status, choice)
        timetable = build_timetable(
            fleet,
            policy,
            tasks,
            experiment.rules,
            seed=seed,
            round=request.round,
            start=start,
            step_cost=count_macs,
        )
        used = int(timetable.used_steps[0])
        self._planned_rows = timetable.row[0, :used].tolist()
        self._planned_macs = timetable.planned[0, :used].tolist()
        self._clock = clock
        self.short = int(timetable.is_short[0, :used].sum())
        self.times: list[float] = []
        self.rows: list[int] = []

    def choose(self, step: int) -> tuple[int, float] | None:
        self.times.append(self._clock())
        if step == len(self._planned_rows):
            return None
        self.rows.append(self._planned_rows[step])
        return self._planned_rows[step], self._planned_macs[step]
