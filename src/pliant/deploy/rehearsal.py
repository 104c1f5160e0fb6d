"""Rehearsal: a real device that follows the experiment's fleet in the place of its own clock.

It computes its own part of the simulator's timetable, so that a federation of real processes does
what a simulation does, bit for bit.
"""

from collections.abc import Callable

import numpy as np

from pliant.deploy.letters import Order
from pliant.deploy.pace import Work
from pliant.devices import Choice, Given, Moment
from pliant.devices.draws import FloatArray, IntArray
from pliant.engine.job import World
from pliant.engine.schedule import timetable
from pliant.engine.tasks import Tasks
from pliant.experiment import Experiment
from pliant.methods.base import Costing, Place


class FleetPace:
    """Choose what the simulator would choose; times are real."""

    def __init__(
        self,
        world: World,
        experiment: Experiment,
        order: Order,
        work: Work,
        clock: Callable[[], float],
    ) -> None:
        place = Place(experiment.seed, order.round, order.device)
        full = np.array([work.sizes], np.float64) * work.full
        nothing = np.zeros(1)
        tasks = Tasks(np.array([order.device]), full, nothing, nothing)

        def realised(which: IntArray, step: int, choice: Choice) -> FloatArray:
            if not len(which):  # its time is over
                return np.zeros(0)
            row = int(choice.row[0])
            if isinstance(world.method, Costing):
                each = world.method.macs(world.net, row, place, step)
            else:
                each = world.net.macs(
                    world.method.subnet(world.net, row, place, step), training=True
                )
            return np.full(len(which), work.sizes[step] * each)

        plan = world.method.plan(world.net)
        if order.row is not None:
            plan = Given(_moment(tasks), Choice(np.array([order.row]), np.array([order.macs])))
        table = timetable(
            experiment.fleet,
            plan,
            tasks,
            experiment.rules,
            seed=experiment.seed,
            round=order.round,
            start=order.round * experiment.fleet.round_seconds,
            realised=realised,
        )
        used = int(table.used[0])
        self._rows = table.row[0, :used].tolist()
        self._macs = table.planned[0, :used].tolist()
        self._clock = clock
        self.short = int(table.is_short[0, :used].sum())
        self.times: list[float] = []
        self.rows: list[int] = []

    def choose(self, step: int) -> tuple[int, float] | None:
        """Return the row and the expected MACs of a mini-batch; None when the round is over."""
        self.times.append(self._clock())
        if step == len(self._rows):
            return None
        self.rows.append(self._rows[step])
        return self._rows[step], self._macs[step]


def _moment(tasks: Tasks) -> Moment:
    """Return the opening of a round as far as a plan that is given looks at it."""
    unknown = np.zeros(1)
    return Moment(
        tasks.devices, 0, unknown, unknown, unknown, 0.0, tasks.full[:, 0], unknown, unknown
    )
