"""The timetable of a round: when every mini-batch of every device starts and ends, and what counts.

It depends on traces and costs but never on weights, so it is computed before any training.
Devices step through their mini-batches in parallel; changes of speed within a step are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.devices import BudgetPolicy, DeviceStatus, Fleet, PiecewiseConstant, RowChoice
from pliant.devices.budget import ROUNDING_TOLERANCE, check_memory
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.link_times import LinkTimes, compute_link_times
from pliant.engine.round_rules import (
    RoundClosure,
    RoundRules,
    TaskOutcome,
    close_round,
    sample_dropout_times,
)
from pliant.engine.round_tasks import RoundTasks
from pliant.engine.step_log import StepLog, compute_interrupted_macs, open_log, sum_first

TasksOfFn = Callable[[IntArray], RoundTasks]  # one row per device -> tasks
StepCostFn = Callable[[IntArray, int, RowChoice], FloatArray]  # (devices, step, choice) -> MACs

_DEFAULT_RULES = RoundRules()
_MAX_WAIT_ROUNDS = 1024  # after which a waiting server gives up on a device


@dataclass(frozen=True, eq=False)
class Timetable:
    """What happens in a round; times are seconds since its start.

    A step that never started has row -1 and an infinite start and end; an interrupted one has an
    infinite end. `used_steps` counts the steps that the server gets; `useful` are their MACs.

    >>> import numpy as np
    >>> from pliant.devices import FULL_NETWORK, ConstantTrace, Fleet
    >>> from pliant.engine.round_rules import RoundRules, TaskOutcome
    >>> from pliant.engine.round_tasks import make_tasks
    >>> from pliant.engine.timetable import build_timetable
    >>> fleet, tasks = Fleet(size=1, speed=ConstantTrace(0.8)), make_tasks(np.array([0]), 4, 10.0)
    >>> table = build_timetable(fleet, FULL_NETWORK, tasks, RoundRules(late="partial"))
    >>> outcome = TaskOutcome(table.outcomes[0]).name
    >>> outcome, int(table.used_steps[0]), float(table.useful[0]), table.spent.round(6)
    ('PARTIAL', 3, 30.0, array([32.96]))
    """

    devices: IntArray
    start: FloatArray  # (device, step)
    end: FloatArray
    row: IntArray
    planned: FloatArray  # MACs
    macs: FloatArray  # actual
    is_short: NDArray[np.bool_]  # ran the smallest row although the budget was below it
    outcomes: NDArray[np.int8]  # (device,): `TaskOutcome` values
    used_steps: IntArray
    arrival: FloatArray
    busy: FloatArray  # seconds from the first mini-batch's start until the device stopped
    spent: FloatArray  # MACs, of which
    useful: FloatArray  # MACs
    available: FloatArray  # MACs that the device could have computed until the round closed
    down: FloatArray  # bytes received: fewer than sent if the device left or the round closed
    up: FloatArray  # bytes of an update that arrived before the round closed
    idle: FloatArray  # seconds from the device's last work or upload until it left or all was over
    closed_at: float


def build_timetable(
    fleet: Fleet,
    policy: BudgetPolicy,
    tasks: RoundTasks,
    rules: RoundRules = _DEFAULT_RULES,
    *,
    seed: int = 0,
    round: int = 0,
    start: float = 0.0,
    target_updates: int | None = None,
    step_cost: StepCostFn | None = None,
    closes_at: float = np.inf,
) -> Timetable:
    """Return the timetable of one round that starts at virtual time `start`.

    `step_cost` gives the actual cost of a step where it differs from the plan (it is not called
    with `cost = "expected"`); `target_updates` is how many updates the server needs, if it has
    selected more devices; `closes_at` closes the round at a time of its own, if nothing else has.

    >>> import numpy as np
    >>> from pliant.devices import ConstantTrace, CostRows, Fleet, PerBatch
    >>> from pliant.engine.round_tasks import make_tasks
    >>> from pliant.engine.timetable import build_timetable
    >>> fleet = Fleet(size=9, speed=ConstantTrace(0.5))
    >>> policy = PerBatch(CostRows((0.25, 0.5, 1.0)))
    >>> table = build_timetable(fleet, policy, make_tasks(np.array([4]), 2, 10.0))
    >>> table.end.tolist(), table.row.tolist(), table.useful.tolist()
    ([[0.5, 1.0]], [[1, 1]], [10.0])
    """
    target = len(tasks.devices) if target_updates is None else target_updates
    fitting = tasks.find_fitting()
    table = _build_fitting_timetable(
        fleet,
        policy,
        tasks if fitting is None else tasks.select(fitting),
        rules,
        step_cost,
        seed=seed,
        round=round,
        start=start,
        target_updates=target,
        closes_at=closes_at,
    )
    if fitting is None:
        return table
    speeds = _compute_speeds(fleet, tasks, seed, start, table.closed_at)
    return _add_declined(table, tasks, fitting, speeds.total)


def _build_fitting_timetable(
    fleet: Fleet,
    policy: BudgetPolicy,
    tasks: RoundTasks,
    rules: RoundRules,
    step_cost: StepCostFn | None,
    *,
    seed: int,
    round: int,
    start: float,
    target_updates: int,
    closes_at: float,
) -> Timetable:
    length = fleet.round_seconds
    dropout_times = sample_dropout_times(
        rules, tasks.devices, seed=seed, round=round, round_seconds=length
    )
    deadline = length * (1 + rules.grace)
    while True:
        speeds = _compute_speeds(fleet, tasks, seed, start, 1.01 * deadline)
        links = _compute_links(fleet, tasks, seed, start, 1.01 * deadline)
        send_by = links.find_latest_start(deadline) + 2 * ROUNDING_TOLERANCE * length
        cutoff = np.minimum(send_by, dropout_times)
        is_planned = step_cost is None or rules.cost == "expected"
        is_planned = is_planned and tasks.slowness is None and not tasks.open_passes
        if policy.is_per_round and is_planned:
            log = _run_planned_steps(policy, tasks, speeds, links, cutoff, rules, length)
        else:
            log = _run_steps(policy, tasks, speeds, links, cutoff, step_cost, rules, length)
        arrival = links.compute_arrival(log.finish_times)
        if rules.late != "wait" or deadline > _MAX_WAIT_ROUNDS * length:
            break
        if not (np.isinf(arrival) & np.isinf(dropout_times)).any():
            break
        deadline *= 2

    closure = close_round(
        rules,
        arrival,
        np.isfinite(log.end).sum(axis=1),
        dropout_times,
        target_updates=target_updates,
        round_seconds=length,
        deadline=deadline,
        closes_at=closes_at,
    )
    return _assemble_timetable(rules, tasks, speeds, links, log, cutoff, dropout_times, closure)


def _assemble_timetable(
    rules: RoundRules,
    tasks: RoundTasks,
    speeds: PiecewiseConstant,
    links: LinkTimes,
    log: StepLog,
    cutoff: FloatArray,
    dropout_times: FloatArray,
    closure: RoundClosure,
) -> Timetable:
    outcomes, closed_at = closure.outcomes, closure.closed_at
    finished, partial = TaskOutcome.FINISHED.value, TaskOutcome.PARTIAL.value
    is_used = (outcomes == finished) | (outcomes == partial)
    stop_times = np.minimum(log.finish_times, cutoff)
    stop_times = np.where(is_used, stop_times, np.minimum(stop_times, closed_at))
    stop_times = np.maximum(stop_times, links.download_end)
    busy = stop_times - links.download_end
    steps_done = (log.end <= stop_times[:, None]).sum(axis=1)
    used_steps = np.where(is_used, steps_done, 0)
    done = sum_first(log.macs, steps_done)
    spent = done + compute_interrupted_macs(rules, tasks, speeds, log, steps_done, stop_times)
    # rounding may end a step after the close
    available = speeds.work(np.maximum(np.where(busy > 0, stop_times, 0.0), closed_at))
    if rules.changes == "batch" or tasks.slowness is not None:
        # while it worked, a device could do what it did
        available += spent - (speeds.work(stop_times) - speeds.work(links.download_end))
    done_at = np.where(np.isfinite(closure.arrival), closure.arrival, stop_times)
    return Timetable(
        tasks.devices,
        *log[:-1],
        outcomes,
        used_steps,
        closure.arrival,
        busy=busy,
        spent=spent,
        useful=done if is_used.all() else sum_first(log.macs, used_steps),
        available=available,
        down=links.count_received_bytes(np.minimum(dropout_times, closed_at)),
        up=np.where(closure.arrival <= closed_at, tasks.up_bytes, 0.0),
        idle=np.maximum(np.minimum(dropout_times, closed_at) - done_at, 0.0),
        closed_at=closed_at,
    )


def _add_declined(
    table: Timetable, tasks: RoundTasks, fitting: IntArray, available: FloatArray
) -> Timetable:
    """Add the devices in whose memory no row fits: they decline at once and cost nothing."""
    blanks: dict[str, Any] = {"start": np.inf, "end": np.inf, "row": -1, "arrival": np.inf}
    blanks |= {"outcomes": TaskOutcome.DECLINED, "available": available}
    values = {}
    for name, part in vars(table).items():
        if name not in ("devices", "closed_at"):
            values[name] = np.zeros((len(tasks.devices), *part.shape[1:]), part.dtype)
            values[name][:] = blanks.get(name, 0)
            values[name][fitting] = part
    return Timetable(tasks.devices, closed_at=table.closed_at, **values)


def compute_start_status(
    fleet: Fleet,
    tasks: RoundTasks,
    *,
    seed: int = 0,
    start: float = 0.0,
    tasks_of: TasksOfFn | None = None,
) -> DeviceStatus:
    """Return the status of devices at the start of a round, when a per-round policy chooses.

    `tasks_of` gives the tasks of devices that get these rows, if the row decides what is sent.

    >>> import numpy as np
    >>> from pliant.devices import ConstantTrace, CostRows, Fleet, PerRound
    >>> from pliant.engine.round_tasks import make_tasks
    >>> from pliant.engine.timetable import compute_start_status
    >>> fleet = Fleet(size=1, speed=ConstantTrace(0.6))
    >>> status = compute_start_status(fleet, make_tasks(np.array([0]), 4, 10.0))
    >>> PerRound(CostRows((0.25, 0.5, 1.0))).choose(status).row.tolist()
    [1]
    """
    length = fleet.round_seconds
    speeds = _compute_speeds(fleet, tasks, seed, start, length)
    links = _compute_links(fleet, tasks, seed, start, length).hold()
    speed = speeds.speed(np.zeros(len(tasks.devices)))
    status = _build_status(tasks, links, slice(None), 0, links.download_end, speed, length)
    if tasks_of is None:
        return status

    def compute_link_seconds(rows: IntArray) -> FloatArray:
        links = _compute_links(fleet, tasks_of(rows), seed, start, length).hold()
        return links.download_end + links.estimate_upload(links.download_end)

    return status._replace(link_seconds_of=compute_link_seconds)


def _compute_speeds(
    fleet: Fleet, tasks: RoundTasks, seed: int, start: float, seconds: float
) -> PiecewiseConstant:
    one_pass = tasks.full_macs.sum(axis=1) / max(1, tasks.open_passes)
    full_speed = fleet.macs_per_second or one_pass / fleet.round_seconds
    return fleet.compute_speeds(tasks.devices, start, seconds, seed=seed).scale(full_speed)


def _compute_links(
    fleet: Fleet, tasks: RoundTasks, seed: int, start: float, seconds: float
) -> LinkTimes:
    sizes = tasks.down_bytes, tasks.up_bytes
    return compute_link_times(fleet, tasks.devices, *sizes, seed=seed, start=start, length=seconds)


def _build_status(
    tasks: RoundTasks,
    links: LinkTimes,
    active: IntArray | slice,
    step: int,
    now: FloatArray,
    speed: FloatArray,
    round_seconds: float,
) -> DeviceStatus:
    times = np.zeros(len(tasks.devices))
    times[active] = now
    upload_seconds = links.estimate_upload(times)[active]
    return DeviceStatus(
        tasks.devices[active],
        step,
        now,
        speed,
        round_seconds - upload_seconds - now,
        round_seconds,
        tasks.full_macs[active, step],
        tasks.full_macs_left[active, step],
        tasks.full_macs_left[active, 0] / max(1, tasks.open_passes),
        links.download_end[active] + upload_seconds,
        fits=None if tasks.fits is None else tasks.fits[active],
    )


def _run_steps(
    policy: BudgetPolicy,
    tasks: RoundTasks,
    speeds: PiecewiseConstant,
    links: LinkTimes,
    cutoff: FloatArray,
    step_cost: StepCostFn | None,
    rules: RoundRules,
    round_seconds: float,
) -> StepLog:
    """Run every device step by step until it is done or its cutoff has passed."""
    shape, log = tasks.full_macs.shape, open_log(tasks)
    may_stop = tasks.open_passes > 0 and rules.late == "discard"
    if rules.cost == "expected":
        step_cost = None
    everyone, now = np.arange(shape[0]), links.download_end
    active: IntArray | slice = slice(None)  # everyone: much faster than their numbers
    known_links = links.hold() if policy.is_per_round else links
    for step in range(shape[1]):
        is_active = (tasks.full_macs[active, step] > 0) & (now < cutoff[active])
        if not is_active.all():
            active, now = everyone[active][is_active], now[is_active]
            speeds = speeds.select(np.flatnonzero(is_active))
        if policy.is_per_round and step:
            share = log.planned[active, 0] / tasks.full_macs[active, 0]
            planned = share * tasks.full_macs[active, step]
            choice = RowChoice(log.row[active, 0], planned, log.is_short[active, 0])
        else:
            # a per-round policy chooses on the server, before the download
            ready = known_links.download_end[active] if policy.is_per_round else now
            speed = speeds.speed(np.zeros_like(now) if policy.is_per_round else now)
            status = _build_status(tasks, known_links, active, step, ready, speed, round_seconds)
            choice = policy.choose(status)
            check_memory(status, choice)
            if may_stop and step:  # what would be late is not begun
                seconds = tasks.compute_work(choice.row, choice.macs) / speed
                fits = seconds <= status.time_left + ROUNDING_TOLERANCE * round_seconds
                log.num_steps[everyone[active][~fits]] = step
                active, now = everyone[active][fits], now[fits]
                speeds, choice = speeds.select(np.flatnonzero(fits)), choice.select(fits)
        macs = choice.macs if step_cost is None else step_cost(tasks.devices[active], step, choice)
        work, is_held = tasks.compute_work(choice.row, macs), rules.changes == "batch"
        end = speeds.finish_time_held(now, work) if is_held else speeds.finish_time(now, work)
        log.start[active, step] = now
        log.end[active, step] = np.where(end <= cutoff[active], end, np.inf)
        log.row[active, step] = choice.row
        log.planned[active, step] = choice.macs
        log.macs[active, step] = macs
        if choice.is_short is not None:
            log.is_short[active, step] = choice.is_short
        now = end
    return log


def _run_planned_steps(
    policy: BudgetPolicy,
    tasks: RoundTasks,
    speeds: PiecewiseConstant,
    links: LinkTimes,
    cutoff: FloatArray,
    rules: RoundRules,
    round_seconds: float,
) -> StepLog:
    """Run the steps of a policy that chooses once: what they cost is known for all of them."""
    known_links = links.hold()
    ready = known_links.download_end
    speed = speeds.speed(np.zeros(len(tasks.devices)))
    status = _build_status(tasks, known_links, slice(None), 0, ready, speed, round_seconds)
    choice = policy.choose(status)
    check_memory(status, choice)
    macs = (choice.macs / tasks.full_macs[:, 0])[:, None] * tasks.full_macs
    macs[:, 0] = choice.macs
    finish_time = speeds.finish_time_held if rules.changes == "batch" else speeds.finish_time
    times = np.empty((macs.shape[0], macs.shape[1] + 1))
    times[:, 0] = links.download_end
    for step in range(macs.shape[1]):
        times[:, step + 1] = finish_time(times[:, step], macs[:, step])
    start, end, limit = times[:, :-1], times[:, 1:], cutoff[:, None]
    has_step = tasks.full_macs > 0
    is_run = has_step & (start < limit)  # a step after the cutoff does not begin
    macs = np.where(is_run, macs, 0.0)
    is_short = np.zeros(len(macs), np.bool_) if choice.is_short is None else choice.is_short
    return StepLog(
        np.where(is_run, start, np.inf),
        np.where(is_run & (end <= limit), end, np.inf),
        np.where(is_run, choice.row[:, None], -1),
        macs,
        macs,
        is_run & is_short[:, None],
        has_step.sum(axis=1),
    )
