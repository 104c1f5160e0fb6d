"""How long a training step takes on a device: time = a + b · MACs + c · activation bytes.

Half of the filters cost a quarter of the MACs but half of the time of norm layers, activations and
copies, which shrink only linearly: so a second term that follows the bytes that are written.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from pliant.explore.front import FloatArray
from pliant.nn.elastic import Elastic, Rates
from pliant.nn.subnet import Subnet
from pliant.value import Count, NonNegative, Value, decode

BYTES = 4  # of a float32


class Profile(Value, frozen=True):
    """The three constants of a device, and how far the model was off where it was not fitted.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> profile = pl.Profile(start=1e-3, per_mac=1e-10, per_byte=0.0, batch=32)
    >>> 0.001 < profile.seconds(net, 0.5) < profile.seconds(net, 0.0) < 0.01
    True
    """

    start: NonNegative  # seconds of a step
    per_mac: NonNegative  # seconds
    per_byte: NonNegative  # seconds
    batch: Count  # samples in a step
    error: NonNegative | None = None  # median of |predicted - measured| / measured, held out

    def seconds(self, net: Elastic, of: Rates | Subnet) -> float:
        """Return the seconds of a training step at rates, or of one subnet."""
        macs, written = amounts(net, of, self.batch)
        return self.start + self.per_mac * macs + self.per_byte * written


def load_profile(path: Path) -> Profile:
    """Read what `pliant bench profile` has written."""
    try:
        return decode(msgspec.json.decode(path.read_bytes()), Profile)
    except ValueError as error:  # msgspec's errors are too
        raise ValueError(f"{path}: expected a profile: {error}") from None


def amounts(net: Elastic, of: Rates | Subnet, batch: int) -> tuple[float, float]:
    """Return the MACs and the activation bytes of a training step."""
    return batch * net.macs(of, training=True), batch * BYTES * net.activations(of)


def fit(amounts: Sequence[tuple[float, float]], seconds: Sequence[float], batch: int) -> Profile:
    """Fit the constants, none of them negative, to relative errors."""
    given, times = np.asarray(amounts, np.float64), np.asarray(seconds, np.float64)
    if len(times) < 3 or len(given) != len(times):
        raise ValueError(
            f"Expected three timed steps or more, got {len(times)} for {len(given)} amounts"
        )
    columns = np.column_stack([np.ones(len(times)), given])
    scale = columns.max(axis=0)
    found = _non_negative(columns / scale / times[:, None], np.ones(len(times))) / scale
    return Profile(float(found[0]), float(found[1]), float(found[2]), batch)


def errors(
    profile: Profile, amounts: Sequence[tuple[float, float]], seconds: Sequence[float]
) -> FloatArray:
    """Return |predicted - measured| / measured of each step."""
    given, times = np.asarray(amounts, np.float64), np.asarray(seconds, np.float64)
    told = profile.start + given @ np.array([profile.per_mac, profile.per_byte])
    return np.asarray(np.abs(told - times) / times)


def _non_negative(columns: FloatArray, wanted: FloatArray) -> FloatArray:
    """Solve least squares with no negative coefficient, by trying every set of columns."""
    best, least = np.zeros(columns.shape[1]), float(wanted @ wanted)
    for choice in range(1, 2 ** columns.shape[1]):
        used = [place for place in range(columns.shape[1]) if choice >> place & 1]
        part = np.linalg.lstsq(columns[:, used], wanted, rcond=None)[0]
        rest = wanted - columns[:, used] @ part
        if (part >= 0).all() and rest @ rest < least:
            best, least = np.zeros(columns.shape[1]), float(rest @ rest)
            best[used] = part
    return best
