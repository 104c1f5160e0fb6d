"""The log of the steps of a round, from which its timetable is made."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.devices import PiecewiseConstant
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.round_rules import RoundRules
from pliant.engine.round_tasks import RoundTasks


class StepLog(NamedTuple):
    """The steps of a round's tasks, so far; times are seconds since its start."""

    start: FloatArray  # (device, step)
    end: FloatArray
    row: IntArray
    planned: FloatArray
    macs: FloatArray
    is_short: NDArray[np.bool_]
    num_steps: IntArray  # (device,): of its task, fewer if it stopped by itself

    @property
    def finish_times(self) -> FloatArray:
        """Return when each task is done; infinity if it is not."""
        finish: FloatArray = self.end[np.arange(len(self.num_steps)), self.num_steps - 1]
        return finish


def open_log(tasks: RoundTasks) -> StepLog:
    """Return the log of tasks that have not begun."""
    shape = tasks.full_macs.shape
    return StepLog(
        np.full(shape, np.inf),
        np.full(shape, np.inf),
        np.full(shape, -1),
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(shape, np.bool_),
        np.count_nonzero(tasks.full_macs, axis=1),
    )


def sum_first(values: FloatArray, counts: IntArray) -> FloatArray:
    """Return the sum of the first `counts` entries of each row."""
    first: FloatArray = np.where(np.arange(values.shape[1]) < counts[:, None], values, 0.0)
    return np.asarray(first.sum(axis=1))


def compute_interrupted_macs(
    rules: RoundRules,
    tasks: RoundTasks,
    speeds: PiecewiseConstant,
    log: StepLog,
    steps_done: IntArray,
    stop_times: FloatArray,
) -> FloatArray:
    """Return the MACs spent on the step in which each device stopped."""
    if (steps_done == log.start.shape[1]).all():
        return np.zeros(len(steps_done))
    everyone, step = np.arange(len(steps_done)), np.minimum(steps_done, log.start.shape[1] - 1)
    step_start = np.minimum(log.start[everyone, step], stop_times)
    is_interrupted = (steps_done < log.start.shape[1]) & (step_start < stop_times)
    if rules.changes == "batch":
        work = speeds.held_work(step_start, stop_times)
    else:
        work = speeds.work(stop_times) - speeds.work(step_start)
    macs = work / tasks.compute_work(log.row[everyone, step], np.ones(len(step)))
    return np.where(is_interrupted, macs, 0.0)
