"""Which devices train next: at random, or by what is known of their speed, losses and age.

Oort: Lai et al., "Oort: Efficient federated learning via guided participant selection", OSDI 2021,
with the constants of its authors' code. Power of choice: Cho, Wang and Joshi, "Towards
understanding biased client selection in federated learning", AISTATS 2022.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.ledger import MERGED_OUTCOMES, TaskRecord
from pliant.rng import rng_stream
from pliant.value import Fraction, NonNegative, Value

Factor = Annotated[float, Meta(ge=1.0, le=1000.0)]


class Fastest(Value, frozen=True, tag="fastest"):
    """Draw `candidates` times as many devices as needed, and select those that are fastest now.

    A device's speed counts as multiplied by 1 + `age_bonus` × the rounds since its last selection,
    so that slow devices have their turn too.

    >>> import pliant as pl
    >>> pl.RunSettings(select=pl.Fastest(candidates=3.0)).select.age_bonus
    0.1
    """

    candidates: Factor = 2.0
    age_bonus: NonNegative = 0.1


class PowerOfChoice(Value, frozen=True, tag="power-of-choice"):
    """Draw `candidates` times as many devices as needed, and select those with the largest loss.

    The loss is that of a device's last update, so that candidates need not evaluate the network
    first; devices without one come before all others.

    >>> import pliant as pl
    >>> pl.RunSettings(select=pl.PowerOfChoice(candidates=3.0)).select.candidates
    3.0
    """

    candidates: Factor = 2.0


class Oort(Value, frozen=True, tag="oort"):
    """Select devices with useful data and short rounds, and explore the others.

    A device's utility is its samples × its last loss, clipped at the quantile `clip` and scaled to
    [0, 1], plus a bonus that grows with the rounds since its last update. Devices slower than the
    quantile `fast_share` of durations are penalised.

    >>> import pliant as pl
    >>> pl.RunSettings(select=pl.Oort(exploration=0.5)).select.min_exploration
    0.3
    """

    exploration: Fraction = 0.9  # share of devices selected among those never seen, at first
    decay: Fraction = 0.98  # of that share, per round
    min_exploration: Fraction = 0.3
    clip: Fraction = 0.95
    age_weight: NonNegative = 0.1
    fast_share: Fraction = 0.3
    slow_penalty: NonNegative = 2.0  # exponent of (preferred / actual duration)
    cutoff: Fraction = 0.95  # of the utility at the last rank: above it devices are drawn


Selection = Literal["uniform", "available"] | Fastest | PowerOfChoice | Oort


class LastTask(NamedTuple):
    """What the server knows of a device from its tasks so far."""

    round: int  # of its last task
    seconds: float  # that it was busy
    samples: int = 0  # in its last merged update
    loss: float | None = None  # of its last merged update


History = Mapping[int, LastTask]  # by device
SpeedFn = Callable[[IntArray], FloatArray]  # the speeds of devices now; 0 is unavailable


def extend_history(history: History, tasks: Iterable[TaskRecord]) -> History:
    """Return the history after the tasks of another round.

    >>> import pliant as pl
    >>> from pliant.engine.selection import extend_history
    >>> task = pl.TaskRecord(3, 7, "finished", 32, 1, 5e6, 5e6, 9e6, 1000, 1000, 0.5, 0.0, loss=2.0)
    >>> extend_history({}, [task])
    {7: LastTask(round=3, seconds=0.5, samples=32, loss=2.0)}
    """
    result = dict(history)
    for task in tasks:
        samples, loss = task.samples, task.loss
        if task.outcome not in MERGED_OUTCOMES or loss is None:
            _, _, samples, loss = history.get(task.device, LastTask(0, 0.0))
        result[task.device] = LastTask(task.round, task.seconds, samples, loss)
    return result


def select_devices(
    fleet_size: int,
    count: int,
    selection: Selection,
    *,
    seed: int,
    round: int,
    speeds: SpeedFn,
    history: History,
    busy: Collection[int] = (),
) -> IntArray:
    """Select devices without replacement, in rising order; fewer if fewer are available.

    Devices that are `busy` are left out. The cost grows with `count`, these devices and those seen
    so far, not with the fleet.
    """
    count = min(count, fleet_size - len(busy))
    rng = rng_stream(seed, "select", round)
    if selection == "uniform":
        idle = np.sort(rng.choice(fleet_size - len(busy), count, replace=False, shuffle=False))
        for device in sorted(busy):
            idle[idle >= device] += 1
        return idle
    if busy:
        speeds = partial(_stop_busy, speeds, list(busy))
    draw = partial(_draw_available, fleet_size, speeds=speeds, rng=rng)
    if selection == "available":
        return np.sort(draw(count))
    if isinstance(selection, Oort):
        share = max(selection.min_exploration, selection.exploration * selection.decay**round)
        unseen = draw(math.floor(share * count + 0.5), excluded=history.keys())
        known = np.array(sorted(history), np.int64)
        known = known[speeds(known) > 0]
        scores = compute_oort_utilities(selection, known, history, round)
        useful = _draw_useful(known, scores, count - len(unseen), selection.cutoff, rng)
        rest = draw(count - len(unseen) - len(useful), excluded={*history, *unseen.tolist()})
        return np.sort(np.concatenate([unseen, useful, rest]))
    candidates = draw(math.ceil(count * selection.candidates - 1e-9))
    if isinstance(selection, Fastest):
        ages = np.array([round - _get_last_round(history, d) for d in candidates.tolist()])
        scores = speeds(candidates) * (1 + selection.age_bonus * ages)
    else:
        scores = np.array([_get_loss(history, device) for device in candidates.tolist()])
    return np.sort(candidates[np.argsort(-scores, kind="stable")[:count]])


def compute_oort_utilities(
    selection: Oort, devices: IntArray, history: History, round: int
) -> FloatArray:
    """Return the utility of devices that have been selected before."""
    tasks = [history[device] for device in devices.tolist()]
    if not tasks:
        return np.zeros(0)
    rewards = np.array([task.samples * (task.loss or 0.0) for task in tasks])
    rewards = np.minimum(rewards, np.quantile(rewards, selection.clip))
    lowest, spread = rewards.min(), np.ptp(rewards)
    scaled = (rewards - lowest) / spread if spread > 0 else np.ones(len(tasks))
    last = np.array([task.round + 1 for task in tasks])  # rounds are counted from 1 here
    utilities = scaled + np.sqrt(selection.age_weight * math.log(round + 1) / last)
    seconds = np.array([task.seconds for task in tasks])
    preferred = np.quantile(seconds, selection.fast_share)
    slowdown = np.where(seconds > preferred, preferred / np.maximum(seconds, 1e-300), 1.0)
    return np.asarray(utilities * slowdown**selection.slow_penalty)


def _stop_busy(speeds: SpeedFn, busy: list[int], devices: IntArray) -> FloatArray:
    return np.where(np.isin(devices, busy), 0.0, speeds(devices))


def _draw_useful(
    devices: IntArray, utilities: FloatArray, count: int, cutoff: float, rng: np.random.Generator
) -> IntArray:
    """Draw devices by their utility, among those close to the best or better."""
    count = min(count, len(devices))
    if count <= 0:
        return devices[:0]
    threshold = cutoff * np.sort(utilities)[-count]
    is_near = utilities >= threshold
    weights = utilities[is_near] + 1e-12  # so that devices of no utility can be drawn too
    return rng.choice(devices[is_near], count, replace=False, p=weights / weights.sum())


def _get_last_round(history: History, device: int) -> int:
    return history[device].round if device in history else -1


def _get_loss(history: History, device: int) -> float:
    loss = history[device].loss if device in history else None
    return math.inf if loss is None else loss


def _draw_available(
    fleet_size: int,
    count: int,
    *,
    speeds: SpeedFn,
    rng: np.random.Generator,
    excluded: Collection[int] = (),
) -> IntArray:
    """Draw devices that are available now, in batches, so that the fleet's size costs nothing."""
    count = min(count, fleet_size)
    selected: list[int] = []
    seen = set(excluded)
    batch_size = 2 * count
    while len(selected) < count and len(seen) < fleet_size:
        if batch_size * 2 > fleet_size:  # nearly all are needed: try the rest in random order
            candidates = np.array(
                [d for d in rng.permutation(fleet_size).tolist() if d not in seen]
            )
        else:
            fresh = dict.fromkeys(rng.integers(fleet_size, size=batch_size).tolist())
            candidates = np.array([device for device in fresh if device not in seen], np.int64)
            batch_size *= 2
        if not len(candidates):
            continue
        seen.update(candidates.tolist())
        selected.extend(candidates[speeds(candidates) > 0].tolist())
    return np.array(selected[:count], np.int64)
