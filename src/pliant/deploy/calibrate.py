"""How long a mini-batch takes on this machine: a few timed steps at a few rates, kept in a file."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pliant import atomic
from pliant.deploy.curve import Curve, curve_from
from pliant.explore.profile import Profile, amounts, fit
from pliant.nn.elastic import Elastic
from pliant.nn.learner import Learner
from pliant.nn.optimiser import Sgd
from pliant.params import params_of
from pliant.rng import stream

RATES = (0.0, 0.25, 0.5, 0.7)
STEPS = 5  # timed at each rate, of which the shortest counts: cold caches only add
PATIENCE = 3.0  # seconds at one rate, after its first two steps
POINTS = 12

Points = tuple[tuple[float, float], ...]  # share of the full MACs, seconds


def calibrated(net: Elastic, x: Tensor, y: Tensor, folder: Path) -> Curve:
    """Return how long mini-batches take here: as it was kept, or measured at the first time."""
    try:
        points = msgspec.json.decode(_path(net, len(y), folder).read_bytes(), type=Points)
    except (FileNotFoundError, msgspec.DecodeError):
        points = ()
    curve = curve_from(points)
    if curve is None:
        curve = curve_of(net, measured(net, x, y))
        keep(curve, net, len(y), folder)
    return curve


def keep(curve: Curve, net: Elastic, batch: int, folder: Path) -> None:
    """Write a curve for the next start."""
    atomic.write_bytes(_path(net, batch, folder), msgspec.json.encode(points_of(curve)))


def points_of(curve: Curve) -> Points:
    """Return a curve as plain numbers."""
    return tuple(zip(curve.shares.tolist(), curve.seconds.tolist(), strict=True))


def _path(net: Elastic, batch: int, folder: Path) -> Path:
    return folder / f"curve-{net.fingerprint[:16]}-{batch}.json"


def measured(
    net: Elastic, x: Tensor, y: Tensor, *, clock: Callable[[], float] = time.process_time
) -> Profile:
    """Time training steps at a few rates and fit the three constants.

    The clock is that of the CPU: what a step would take if nothing else ran, whatever does.
    """
    learner = Learner(net, params_of(net.net), Sgd())
    costs, seconds = [], []
    for number, rate in enumerate(RATES):
        subnet = net.draw(rate, stream(0, "calibration", number), "rounded") if rate else net.full
        learner.switch(subnet)
        best, since = float("inf"), 0.0
        for step in range(STEPS + 1):
            start = clock()
            learner.step(x, lambda output: F.cross_entropy(output, y), lr=0.0)
            took = clock() - start
            if step:  # the first one makes what the others find
                best, since = min(best, took), since + took
            if since > PATIENCE:
                break
        costs.append(amounts(net, subnet, len(y)))
        seconds.append(best)
    return fit(costs, seconds, len(y))


def curve_of(net: Elastic, profile: Profile) -> Curve:
    """Return the seconds of a mini-batch over its share of the full network's MACs."""
    full = net.macs(0.0, training=True)
    rates = np.linspace(max(RATES), 0.0, POINTS)
    shares = [net.macs(float(rate), training=True) / full for rate in rates]
    seconds = [profile.seconds(net, float(rate)) for rate in rates]
    rising = np.maximum.accumulate(np.array(seconds))
    return Curve(np.array(shares), rising)


def example_batch(x: Tensor, y: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Repeat samples up to a mini-batch."""
    times = -(-size // len(y))
    return torch.cat([x] * times)[:size], torch.cat([y] * times)[:size]
