"""Predict the time of a training step on a device: a + b · MACs + c · activation bytes.

Half of the filters cost a quarter of the MACs, but norm layers, activations and copies shrink only
linearly; the third term covers them by the bytes written.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pliant.nn.elastic import Elastic, Rates
from pliant.nn.subnet import Subnet
from pliant.storage import atomic, formats
from pliant.table_search.pareto import FloatArray
from pliant.value import Count, NonNegative, Value, decode, encode

FLOAT_BYTES = 4  # of a float32


class StepTimeModel(Value, frozen=True):
    """The three constants of a device, and the error on held-out measurements.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> profile = pl.StepTimeModel(start=1e-3, per_mac=1e-10, per_byte=0.0, batch=32)
    >>> 0.001 < profile.predict_seconds(net, 0.5) < profile.predict_seconds(net, 0.0) < 0.01
    True
    """

    start: NonNegative  # seconds of a step
    per_mac: NonNegative  # seconds
    per_byte: NonNegative  # seconds
    batch: Count  # samples in a step
    error: NonNegative | None = None  # median of |predicted - measured| / measured, held out

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.start + self.per_mac + self.per_byte > 0:
            raise ValueError("Expected `start`, `per_mac` or `per_byte` above 0, got only zeros")

    def predict_seconds(
        self,
        net: Elastic,
        subnet: Rates | Subnet,
        side: int | None = None,
        batch_share: float = 1.0,
    ) -> float:
        """Return the seconds of a training step at rates, or of one subnet.

        The time to resize the images is not included.
        """
        net = net if side is None else net.at(side, side)
        macs, written = count_step_work(net, subnet, batch_share * self.batch)
        return self.start + self.per_mac * macs + self.per_byte * written


def save_step_time_model(path: Path, model: StepTimeModel) -> None:
    """Write a model for `search.profile`."""
    plain = {"format": formats.STEP_TIME_MODEL.number} | encode(model)
    atomic.write_bytes(path, msgspec.json.encode(plain) + b"\n")


def load_step_time_model(path: Path) -> StepTimeModel:
    """Read a model written by `pliant bench profile`."""
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        formats.STEP_TIME_MODEL.check(raw.pop("format", None), path)
        return decode(raw, StepTimeModel)
    except formats.UnsupportedFormat:
        raise
    except ValueError as error:  # includes msgspec's errors
        raise ValueError(f"{path}: expected a profile: {error}") from None


def count_step_work(net: Elastic, subnet: Rates | Subnet, batch: float) -> tuple[float, float]:
    """Return the MACs and the activation bytes of a training step."""
    activation_bytes = batch * FLOAT_BYTES * net.count_activations(subnet)
    return batch * net.macs(subnet, training=True), activation_bytes


def fit_step_time_model(
    amounts: Sequence[tuple[float, float]], seconds: Sequence[float], batch: int
) -> StepTimeModel:
    """Fit non-negative constants that minimise the relative errors."""
    work, times = np.asarray(amounts, np.float64), np.asarray(seconds, np.float64)
    if len(times) < 3 or len(work) != len(times):
        raise ValueError(
            f"Expected at least three timed steps, got {len(times)} for {len(work)} amounts"
        )
    columns = np.column_stack([np.ones(len(times)), work])
    scale = columns.max(axis=0)
    solution = _solve_non_negative(columns / scale / times[:, None], np.ones(len(times))) / scale
    return StepTimeModel(float(solution[0]), float(solution[1]), float(solution[2]), batch)


def compute_relative_errors(
    model: StepTimeModel, amounts: Sequence[tuple[float, float]], seconds: Sequence[float]
) -> FloatArray:
    """Return |predicted - measured| / measured of each step."""
    work, times = np.asarray(amounts, np.float64), np.asarray(seconds, np.float64)
    predicted = model.start + work @ np.array([model.per_mac, model.per_byte])
    return np.asarray(np.abs(predicted - times) / times)


def _solve_non_negative(columns: FloatArray, targets: FloatArray) -> FloatArray:
    """Solve non-negative least squares by trying every set of columns."""
    best, lowest = np.zeros(columns.shape[1]), float(targets @ targets)
    for bits in range(1, 2 ** columns.shape[1]):
        used = [column for column in range(columns.shape[1]) if bits >> column & 1]
        solution = np.linalg.lstsq(columns[:, used], targets, rcond=None)[0]
        residual = targets - columns[:, used] @ solution
        if (solution >= 0).all() and residual @ residual < lowest:
            best, lowest = np.zeros(columns.shape[1]), float(residual @ residual)
            best[used] = solution
    return best
