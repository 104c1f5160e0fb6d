"""Measure how long a mini-batch takes on this machine, and cache the result in a file."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.deploy.step_times import CurvePoints, StepTimeCurve, parse_curve
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


def load_or_calibrate(net: Elastic, x: Tensor, y: Tensor, folder: Path) -> StepTimeCurve:
    """Return the cached step times of this machine, measuring them if there are none."""
    path = _curve_path(net, len(y), folder)
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=StoredCurve)
        points = stored.points if stored.format == formats.STEP_TIME_CURVE.number else ()
    except (FileNotFoundError, msgspec.DecodeError):
        points = ()
    curve = parse_curve(points)
    if curve is None:
        curve = build_curve(net, measure_step_times(net, x, y))
        write_curve(curve, net, len(y), folder)
    return curve


def write_curve(curve: StepTimeCurve, net: Elastic, batch: int, folder: Path) -> None:
    stored = StoredCurve(formats.STEP_TIME_CURVE.number, to_points(curve))
    atomic.write_bytes(_curve_path(net, batch, folder), msgspec.json.encode(stored))


def to_points(curve: StepTimeCurve) -> CurvePoints:
    return tuple(zip(curve.shares.tolist(), curve.seconds.tolist(), strict=True))


def _curve_path(net: Elastic, batch: int, folder: Path) -> Path:
    return folder / f"curve-{net.fingerprint[:16]}-{batch}.json"


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


def make_example_batch(x: Tensor, y: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Repeat samples to fill a mini-batch."""
    repeats = -(-size // len(y))
    return torch.cat([x] * repeats)[:size], torch.cat([y] * repeats)[:size]
