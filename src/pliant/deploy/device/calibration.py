"""Measure how long a mini-batch takes on this machine, and cache the result in a file."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch.nn.functional as F
from torch import Tensor

from pliant.deploy.step_times import CurvePoints, StepTimeCurve, parse_curve
from pliant.engine.local_work import WorkerContext
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params
from pliant.rng import rng_stream
from pliant.storage import atomic, formats
from pliant.table_search.step_time import StepTimeModel, count_step_work, fit_step_time_model

RATES = (0.0, 0.25, 0.5, 0.7)
STEPS = 5  # timed at each rate; the shortest counts, as cold caches only add time
SECONDS_PER_RATE = 3.0  # stop timing a rate after this long
CURVE_POINTS = 12


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
        x, y = _make_example_batch(context, device)
        curve = build_curve(context.net, measure_step_times(context.net, x, y))
        write_curve(curve, context, folder)
    return curve


def write_curve(curve: StepTimeCurve, context: WorkerContext, folder: Path) -> None:
    stored = StoredCurve(formats.STEP_TIME_CURVE.number, curve.points)
    atomic.write_bytes(_curve_path(context, folder), msgspec.json.encode(stored))


def _curve_path(context: WorkerContext, folder: Path) -> Path:
    return folder / f"curve-{context.net.fingerprint[:16]}-{context.method.local.batch}.json"


def _make_example_batch(context: WorkerContext, device: int) -> tuple[Tensor, Tensor]:
    """Repeat a device's samples to fill a mini-batch."""
    size, share = context.method.local.batch, context.get_share(device)
    samples = context.data.train.select(np.resize(share, size))
    return samples.get_normalised(), samples.labels


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
        best, total = float("inf"), 0.0
        for step in range(STEPS + 1):
            start = clock()
            trainer.step(x, lambda output: F.cross_entropy(output, y), lr=0.0)
            elapsed = clock() - start
            if step:  # the first step also warms up caches
                best, total = min(best, elapsed), total + elapsed
            if total > SECONDS_PER_RATE:
                break
        costs.append(count_step_work(net, subnet, len(y)))
        seconds.append(best)
    return fit_step_time_model(costs, seconds, len(y))


def build_curve(net: Elastic, step_time_model: StepTimeModel) -> StepTimeCurve:
    """Return the seconds per mini-batch as a function of its share of the full MACs."""
    full_macs = net.macs(0.0, training=True)
    rates = np.linspace(max(RATES), 0.0, CURVE_POINTS)
    shares = [net.macs(float(rate), training=True) / full_macs for rate in rates]
    seconds = [step_time_model.predict_seconds(net, float(rate)) for rate in rates]
    rising = np.maximum.accumulate(np.array(seconds))
    return StepTimeCurve(np.array(shares), rising)
