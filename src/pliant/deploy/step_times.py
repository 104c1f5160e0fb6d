"""The time of a mini-batch on a device as a function of its share of the full network's MACs.

It is measured once, cached in a file, and refined in every round.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import torch.nn.functional as F
from torch import Tensor

from pliant.data import InputScale
from pliant.devices import PerBatch, PerRound
from pliant.devices.vector_rng import FloatArray
from pliant.engine.worker_context import WorkerContext
from pliant.methods.base import TaskKey
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params
from pliant.rng import rng_stream
from pliant.storage import atomic, formats
from pliant.table_search.step_time import StepTimeModel, count_step_work, fit_step_time_model

RATES = (0.0, 0.25, 0.5, 0.7)
STEPS = 5  # timed at each rate; the shortest counts, as cold caches only add time
SECONDS_PER_RATE = 3.0  # stop timing a rate after this long
MIN_STEP_SECONDS = 1e-6
CURVE_POINTS = 12
MIN_GROUP_SIZE = 4  # mini-batches per group; a group's median corrects the curve
MAX_GROUPS = 4
MEASUREMENT_WEIGHT = 0.5  # of one round's measurements against the previous curve

CurvePoints = tuple[tuple[float, float], ...]  # share of the full MACs, seconds per mini-batch


@dataclass(frozen=True, eq=False)
class StepTimeCurve:
    """Seconds per full mini-batch over its cost as a share of the full network's.

    >>> import numpy as np
    >>> from pliant.deploy.step_times import StepTimeCurve
    >>> curve = StepTimeCurve(np.array([0.25, 1.0]), np.array([0.5, 1.0]))
    >>> curve.seconds_for(1.0), *(curve.share_within(seconds) for seconds in (0.5, 2.0, 0.25))
    (1.0, 0.25, 2.0, 0.125)
    """

    shares: FloatArray
    seconds: FloatArray

    @property
    def points(self) -> CurvePoints:
        return tuple(zip(self.shares.tolist(), self.seconds.tolist(), strict=True))

    def seconds_for(self, share: float) -> float:
        return float(np.interp(share, self.shares, self.seconds))

    def share_within(self, seconds: float) -> float:
        """Return the share that fits into a time; beyond the curve's ends, in proportion."""
        for end in (0, -1):
            if (seconds <= self.seconds[end]) == (end == 0):
                return float(self.shares[end] * seconds / self.seconds[end])
        return float(np.interp(seconds, self.seconds, self.shares))

    def scale(self, factor: float) -> "StepTimeCurve":
        """Return the curve of a machine slower by a factor."""
        return StepTimeCurve(self.shares, self.seconds * factor)

    def refine(self, shares: Sequence[float], seconds: FloatArray) -> "StepTimeCurve":
        """Move the curve halfway towards measured times, in groups of similar shares.

        >>> import numpy as np
        >>> from pliant.deploy.step_times import StepTimeCurve
        >>> curve = StepTimeCurve(np.array([0.5, 1.0]), np.array([1.0, 2.0]))
        >>> curve.refine([1.0] * 4, np.full(4, 4.0))
        StepTimeCurve(shares=array([0.5, 1. ]), seconds=array([1.5, 3. ]))
        """
        order = np.argsort(np.asarray(shares), kind="stable")
        count = min(MAX_GROUPS, len(order) // MIN_GROUP_SIZE)
        if not count:
            return self
        ratios = np.asarray(seconds) / [self.seconds_for(share) for share in shares]
        groups = np.array_split(order, count)
        group_shares = [float(np.median(np.asarray(shares)[group])) for group in groups]
        group_ratios = [float(np.median(ratios[group])) for group in groups]
        correction = np.interp(self.shares, group_shares, group_ratios)
        factor = 1 + MEASUREMENT_WEIGHT * (correction - 1)
        return StepTimeCurve(self.shares, np.maximum.accumulate(self.seconds * factor))


def parse_curve(points: Sequence[tuple[float, float]]) -> StepTimeCurve | None:
    """Return the curve that a device reports, or None if it is implausible."""
    table = np.array(points, np.float64)
    if table.ndim != 2 or table.shape[1] != 2 or not np.isfinite(table).all():
        return None
    is_rising = bool((np.diff(table, axis=0) >= 0).all() and (table > 0).all())
    return StepTimeCurve(table[:, 0], table[:, 1]) if is_rising else None


class StoredCurve(msgspec.Struct, frozen=True):
    """A cached curve; one with another format number is measured again."""

    format: int
    points: CurvePoints


def load_or_calibrate(context: WorkerContext, device: int, folder: Path) -> StepTimeCurve:
    """Return the cached step times of this machine, measuring them if there are none."""
    try:
        raw = _curve_path(context, folder).read_bytes()
        stored = msgspec.json.decode(raw, type=StoredCurve)
        points = stored.points if stored.format == formats.STEP_TIME_CURVE.number else ()
    except (FileNotFoundError, msgspec.DecodeError):
        points = ()
    curve = parse_curve(points)
    if curve is None:
        share = np.resize(context.data.get_share(device), context.method.local.batch)  # a full one
        samples = context.data.train.select(share)
        inputs = samples.get_normalised(), samples.labels
        if context.scales_inputs:
            curve = measure_rows(context, *inputs)
        else:
            curve = build_curve(context.net, measure_step_times(context.net, *inputs))
        write_curve(curve, context, folder)
    return curve


def write_curve(curve: StepTimeCurve, context: WorkerContext, folder: Path) -> None:
    stored = StoredCurve(formats.STEP_TIME_CURVE.number, curve.points)
    atomic.write_bytes(_curve_path(context, folder), msgspec.json.encode(stored))


def _curve_path(context: WorkerContext, folder: Path) -> Path:
    name = f"curve-{context.net.fingerprint[:16]}-{context.method.local.batch}"
    if context.scales_inputs:  # the rows of a method were timed
        rows = sha256(repr(_list_rows(context)).encode()).hexdigest()
        name += f"-{rows[:8]}"
    return folder / f"{name}.json"


def _list_rows(context: WorkerContext) -> list[tuple[float, int]]:
    """Return the shares and numbers of a few of the method's rows, from cheap to costly ones."""
    policy = context.budget_policy
    shares = policy.rows.shares if isinstance(policy, PerBatch | PerRound) else (1.0,)
    numbers = np.unique(np.linspace(0, len(shares) - 1, CURVE_POINTS).round().astype(int))
    return sorted((shares[number], number) for number in numbers.tolist())


def measure_rows(
    context: WorkerContext, x: Tensor, y: Tensor, *, clock: Callable[[], float] = time.process_time
) -> StepTimeCurve:
    """Time training steps at a few of the method's rows, the scaling of their inputs included."""
    net = context.net
    trainer = SubnetTrainer(net, get_params(net.module), Sgd())
    shares, seconds = [], []
    for share, row in _list_rows(context):
        subnet, scale = context.select_subnet(row, TaskKey(0, 0, 0), 0), context.scale_inputs(row)
        trainer.freeze(context.list_frozen(row))

        def run_step(subnet: Subnet = subnet, scale: InputScale = scale) -> None:
            inputs, labels = scale.apply(x, y)
            trainer.switch(subnet, inputs.shape[2:])
            trainer.step(inputs, lambda output: F.cross_entropy(output, labels), lr=0.0)

        shares.append(share)
        seconds.append(_time_step(run_step, clock))
    return StepTimeCurve(np.array(shares), np.maximum.accumulate(np.array(seconds)))


def _time_step(run_step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest of a few steps, after one that warms up caches."""
    run_step()
    best, total = float("inf"), 0.0
    for _ in range(STEPS):
        start = clock()
        run_step()
        elapsed = clock() - start
        best, total = min(best, elapsed), total + elapsed
        if total > SECONDS_PER_RATE:
            break
    # where CPU time is limited, its clock is too coarse for short steps
    return best or max(total / STEPS, MIN_STEP_SECONDS)


def measure_step_times(
    net: Elastic, x: Tensor, y: Tensor, *, clock: Callable[[], float] = time.process_time
) -> StepTimeModel:
    """Time training steps at a few rates and fit the three constants.

    Uses CPU time, so that other programs do not distort the measurement.
    """
    trainer = SubnetTrainer(net, get_params(net.module), Sgd())
    costs, seconds = [], []
    for number, rate in enumerate(RATES):
        rng = rng_stream(0, "calibration", number)
        subnet = net.draw(rate, rng, "rounded") if rate else net.full
        trainer.switch(subnet)
        run_step = partial(trainer.step, x, lambda output: F.cross_entropy(output, y), lr=0.0)
        costs.append(count_step_work(net, subnet, len(y)))
        seconds.append(_time_step(run_step, clock))
    return fit_step_time_model(costs, seconds, len(y))


def build_curve(net: Elastic, step_time_model: StepTimeModel) -> StepTimeCurve:
    """Return the seconds per mini-batch as a function of its share of the full MACs."""
    full_macs = net.macs(0.0, training=True)
    rates = np.linspace(max(RATES), 0.0, CURVE_POINTS)
    shares = [net.macs(float(rate), training=True) / full_macs for rate in rates]
    seconds = [step_time_model.predict_seconds(net, float(rate)) for rate in rates]
    rising = np.maximum.accumulate(np.array(seconds))
    return StepTimeCurve(np.array(shares), rising)
