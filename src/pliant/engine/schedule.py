"""The timetable of a round: when every mini-batch of every device starts and ends, and what counts.

It depends on traces and costs only, never on weights, so it is computed before anything is trained.
All devices go through their mini-batches side by side; each step is exact under changes of speed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.devices import Choice, Fleet, Moment, Path, Plan
from pliant.devices.draws import FloatArray, IntArray
from pliant.devices.plan import ROUNDING
from pliant.engine.rules import End, Rules, departures, judge
from pliant.engine.tasks import Tasks

Realised = Callable[[IntArray, int, Choice], FloatArray]  # (devices, step, choice) -> MACs

_DISCARD = Rules()
_PATIENCE = 1024  # rounds after which a server that waits gives a device up


@dataclass(frozen=True, eq=False)
class Timetable:
    """What happens in a round; times are seconds since its start.

    A step that never began has row -1 and start and end at infinity; one that was broken off has a
    start but no end. `used` counts the steps that the server gets; `useful` are their MACs.

    >>> import numpy as np
    >>> from pliant.devices import FULL, Constant, Fleet
    >>> from pliant.engine.rules import End, Rules
    >>> from pliant.engine.schedule import timetable
    >>> from pliant.engine.tasks import tasks
    >>> work = tasks(np.array([0]), batches=4, full=10.0)
    >>> table = timetable(Fleet(size=1, speed=Constant(0.8)), FULL, work, Rules(late="partial"))
    >>> End(table.ends[0]).name, int(table.used[0]), float(table.useful[0]), table.spent.round(6)
    ('PARTIAL', 3, 30.0, array([32.]))
    """

    devices: IntArray
    start: FloatArray  # (device, step)
    end: FloatArray
    row: IntArray
    planned: FloatArray  # MACs
    macs: FloatArray  # as realised
    is_short: NDArray[np.bool_]  # the smallest row was run although the budget was below it
    ends: NDArray[np.int8]  # (device,): an `End` each
    used: IntArray
    arrival: FloatArray
    busy: FloatArray  # seconds from the first mini-batch's start to where the device stopped
    spent: FloatArray  # MACs, of which
    useful: FloatArray  # MACs
    available: FloatArray  # MACs that the device could have done until the round closed
    close: float

    @property
    def expected(self) -> FloatArray:
        """Return the planned MACs of the steps that the server gets: DISTREAL's weight c."""
        return _first(self.planned, self.used)


def timetable(
    fleet: Fleet,
    plan: Plan,
    tasks: Tasks,
    rules: Rules = _DISCARD,
    *,
    seed: int = 0,
    round: int = 0,
    start: float = 0.0,
    wanted: int | None = None,
    realised: Realised | None = None,
) -> Timetable:
    """Return the timetable of one round that starts at virtual time `start`.

    `realised` gives what a step really costs when that differs from what was planned; `wanted` is
    the number of updates that the server asks for when it has selected more.

    >>> import numpy as np
    >>> from pliant.devices import Constant, Fleet, PerBatch, Rows
    >>> from pliant.engine.schedule import timetable
    >>> from pliant.engine.tasks import tasks
    >>> fleet = Fleet(size=9, speed=Constant(0.5))
    >>> plan = PerBatch(Rows((0.25, 0.5, 1.0)))
    >>> table = timetable(fleet, plan, tasks(np.array([4]), batches=2, full=10.0))
    >>> table.end.tolist(), table.row.tolist(), table.useful.tolist()
    ([[0.5, 1.0]], [[1, 1]], [10.0])
    """
    length = fleet.round_seconds
    clock = _clock(fleet, tasks, seed)
    leaves = departures(rules, tasks.devices, seed=seed, round=round, length=length)
    deadline = length * (1 + rules.grace)
    while True:
        path = _path(fleet, tasks, seed, start, 1.01 * deadline)
        last = np.minimum(deadline - clock.upload + 2 * ROUNDING * length, leaves)
        log = _run(plan, tasks, path, clock, last, realised)
        finish = log.finish(tasks)
        arrival = finish + clock.upload
        is_open = np.isinf(arrival) & np.isinf(leaves)
        if rules.late != "wait" or not is_open.any() or deadline > _PATIENCE * length:
            break
        deadline *= 2

    verdict = judge(
        rules,
        arrival,
        np.isfinite(log.end).sum(axis=1),
        leaves,
        wanted=len(tasks.devices) if wanted is None else wanted,
        length=length,
        deadline=deadline,
    )
    counts = (verdict.ends == End.FINISHED) | (verdict.ends == End.PARTIAL)
    stop = np.maximum(np.minimum(finish, last), clock.begin)
    stop = np.where(counts, stop, np.minimum(stop, verdict.close))
    done = (log.end <= stop[:, None]).sum(axis=1)
    used = np.where(counts, done, 0)
    return Timetable(
        tasks.devices,
        *log,
        verdict.ends,
        used,
        verdict.arrival,
        busy=stop - clock.begin,
        spent=_first(log.macs, done) + _broken_off(path, log, done, stop),
        useful=_first(log.macs, used),
        available=path.work(np.maximum(stop, verdict.close)),  # a step may end in the rounding
        close=verdict.close,
    )


def opening(fleet: Fleet, tasks: Tasks, *, seed: int = 0, start: float = 0.0) -> Moment:
    """Return what is known when the round opens: the moment at which a held plan chooses.

    >>> import numpy as np
    >>> from pliant.devices import Constant, Fleet, PerRound, Rows
    >>> from pliant.engine.schedule import opening
    >>> from pliant.engine.tasks import tasks
    >>> fleet = Fleet(size=1, speed=Constant(0.6))
    >>> moment = opening(fleet, tasks(np.array([0]), batches=4, full=10.0))
    >>> PerRound(Rows((0.25, 0.5, 1.0))).choose(moment).row.tolist()
    [1]
    """
    clock = _clock(fleet, tasks, seed)
    path = _path(fleet, tasks, seed, start, fleet.round_seconds)
    everyone = np.arange(len(tasks.devices))
    return _moment(tasks, clock, everyone, 0, clock.begin, path.speed(np.zeros(len(everyone))))


class _Clock(NamedTuple):
    length: float
    begin: FloatArray  # when the download is in
    upload: FloatArray  # seconds
    full_left: FloatArray  # (device, step)


class _Log(NamedTuple):
    start: FloatArray  # (device, step)
    end: FloatArray
    row: IntArray
    planned: FloatArray
    macs: FloatArray
    is_short: NDArray[np.bool_]

    def finish(self, tasks: Tasks) -> FloatArray:
        steps = np.count_nonzero(tasks.full, axis=1)
        finish: FloatArray = self.end[np.arange(len(steps)), steps - 1]
        return finish


def _clock(fleet: Fleet, tasks: Tasks, seed: int) -> _Clock:
    traits = fleet.traits(tasks.devices, seed=seed)
    left = np.cumsum(tasks.full[:, ::-1], axis=1)[:, ::-1]
    return _Clock(
        fleet.round_seconds,
        np.where(tasks.down > 0, traits.latency + tasks.down / traits.down, 0.0),
        np.where(tasks.up > 0, traits.latency + tasks.up / traits.up, 0.0),
        left,
    )


def _path(fleet: Fleet, tasks: Tasks, seed: int, start: float, length: float) -> Path:
    full_speed = fleet.macs_per_second or tasks.full.sum(axis=1) / fleet.round_seconds
    return fleet.path(tasks.devices, start, length, seed=seed).scaled(full_speed)


def _moment(
    tasks: Tasks, clock: _Clock, live: IntArray, step: int, now: FloatArray, speed: FloatArray
) -> Moment:
    return Moment(
        tasks.devices[live],
        step,
        now,
        speed,
        clock.length - clock.upload[live] - now,
        clock.length,
        tasks.full[live, step],
        clock.full_left[live, step],
        clock.full_left[live, 0],
    )


def _run(
    plan: Plan, tasks: Tasks, path: Path, clock: _Clock, last: FloatArray, realised: Realised | None
) -> _Log:
    """Let every device go on, step after step, until it is through or its last moment is past."""
    shape = tasks.full.shape
    never = np.full(shape, np.inf)
    log = _Log(
        never,
        never.copy(),
        np.full(shape, -1),
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(shape, np.bool_),
    )
    live, now = np.arange(shape[0]), clock.begin
    for step in range(shape[1]):
        goes_on = (tasks.full[live, step] > 0) & (now < last[live])
        if not goes_on.all():
            live, now, path = live[goes_on], now[goes_on], path.rows(np.flatnonzero(goes_on))
        if plan.is_held and step:
            share = log.planned[live, 0] / tasks.full[live, 0]
            planned = share * tasks.full[live, step]
            choice = Choice(log.row[live, 0], planned, log.is_short[live, 0])
        else:
            # a plan that is held was made by the server, before the download
            speed = path.speed(np.zeros_like(now) if plan.is_held else now)
            choice = plan.choose(_moment(tasks, clock, live, step, now, speed))
        macs = choice.macs if realised is None else realised(tasks.devices[live], step, choice)
        end = path.finish(now, macs)
        log.start[live, step] = now
        log.end[live, step] = np.where(end <= last[live], end, np.inf)
        log.row[live, step] = choice.row
        log.planned[live, step] = choice.macs
        log.macs[live, step] = macs
        if choice.is_short is not None:
            log.is_short[live, step] = choice.is_short
        now = end
    return log


def _first(table: FloatArray, count: IntArray) -> FloatArray:
    """Return the sum of the first `count` entries of each row."""
    kept: FloatArray = np.where(np.arange(table.shape[1]) < count[:, None], table, 0.0)
    return np.asarray(kept.sum(axis=1))


def _broken_off(path: Path, log: _Log, done: IntArray, stop: FloatArray) -> FloatArray:
    """Return the MACs spent on the step in which each device was stopped."""
    everyone, step = np.arange(len(done)), np.minimum(done, log.start.shape[1] - 1)
    since = np.minimum(log.start[everyone, step], stop)
    is_broken = (done < log.start.shape[1]) & (since < stop)
    return np.where(is_broken, path.work(stop) - path.work(since), 0.0)
