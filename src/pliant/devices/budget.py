"""Budget policies: how much each device spends on its next mini-batch, given its current status."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.devices.vector_rng import FloatArray, IntArray

BoolArray = NDArray[np.bool_]
Budget = Literal["as-written", "paced"]
AnyBudget = Budget | Literal["unlimited"]
LinkSecondsFn = Callable[[IntArray], FloatArray]  # one row per device -> seconds down and up

# A row that fits exactly must not be lost to rounding. Deadlines allow for twice as much.
ROUNDING_TOLERANCE = 1e-9


class DeviceStatus(NamedTuple):
    """What several devices know just before mini-batch `step`, one entry per device.

    Times are seconds since the start of the round and speeds are MAC/s. The `full_macs` fields are
    costs with the full network.
    """

    devices: IntArray
    step: int
    now: FloatArray
    speed: FloatArray
    time_left: FloatArray  # to the end of the round, less the upload
    round_seconds: float
    full_macs: FloatArray  # of this mini-batch
    full_macs_left: FloatArray  # of this and all later mini-batches
    full_macs_in_round: FloatArray  # of one pass over the data, if the passes are open-ended
    link_seconds: FloatArray | float = 0.0  # download and upload
    link_seconds_of: LinkSecondsFn | None = None  # the same, if what is sent depends on the row
    fits: BoolArray | None = None  # (device, row or 1): rows that fit in memory; None: all do


class RowChoice(NamedTuple):
    """The table row each device runs next, and the MACs expected of it.

    A policy without a table sets only the MACs; the row is then meaningless.
    """

    row: IntArray
    macs: FloatArray
    is_short: BoolArray | None = None  # the budget is below the smallest row, which is run anyway

    def select(self, index: IntArray | BoolArray) -> "RowChoice":
        """Return the choices of some of the devices."""
        is_short = None if self.is_short is None else self.is_short[index]
        return RowChoice(self.row[index], self.macs[index], is_short)


def check_memory(status: DeviceStatus, choice: RowChoice) -> None:
    """Raise if a policy has chosen a row that does not fit in memory."""
    if status.fits is not None and status.fits.shape[1] > 1:
        wrong = np.flatnonzero(~status.fits[np.arange(len(choice.row)), choice.row])
        if len(wrong):
            device, row = status.devices[wrong[0]], choice.row[wrong[0]]
            raise ValueError(f"Expected a row that fits in memory, got {row} on device {device}")


class BudgetPolicy(Protocol):
    """How devices choose a row: before every mini-batch, or once per round.

    >>> import pliant as pl
    >>> policy: pl.BudgetPolicy = pl.PerBatch(pl.CostRows((0.25, 1.0)))
    >>> policy.is_per_round
    False
    """

    @property
    def is_per_round(self) -> bool: ...

    def choose(self, status: DeviceStatus) -> RowChoice: ...


def compute_budget(status: DeviceStatus, kind: AnyBudget) -> FloatArray:
    """Return the MACs that each device may spend on its next mini-batch.

    `as-written` (Rapp et al., Algorithm 1): speed times this mini-batch's fixed slot of the round,
    which is shorter by the download and the upload. `paced`: speed times this mini-batch's share of
    the time left.
    """
    if kind == "unlimited":
        return np.full(len(status.speed), np.inf)
    if kind == "as-written":
        seconds = status.round_seconds - status.link_seconds
        return status.speed * (seconds * status.full_macs / status.full_macs_in_round)
    return status.speed * (status.time_left * status.full_macs / status.full_macs_left)


@dataclass(frozen=True)
class CostRows:
    """A table of possible mini-batch costs, as shares of the full network's cost.

    They rise wherever devices choose between rows by their cost. Rows fit by their `times`, as
    shares of the full network's time, or else by their costs.

    >>> import numpy as np
    >>> from pliant.devices import CostRows
    >>> rows = CostRows((0.25, 0.5, 1.0))
    >>> rows.find_rows(np.array([0.1, 0.5, 0.99, 2.0])).tolist()
    [0, 1, 1, 2]
    """

    shares: tuple[float, ...]
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.shares or not min(self.shares) > 0:
            raise ValueError(f"Expected shares above 0, got {self.shares}")
        if self.times and len(self.times) != len(self.shares):
            raise ValueError(f"Expected {len(self.shares)} times, got {len(self.times)}")

    def check_rising(self) -> None:
        """Raise if a row costs less than the one before."""
        if (np.diff(self.shares) < 0).any():
            raise ValueError(f"Expected rising shares, got {self.shares}")

    @cached_property
    def share_array(self) -> FloatArray:
        return np.array(self.shares, np.float64)

    @cached_property
    def time_array(self) -> FloatArray:
        return np.array(self.times or self.shares, np.float64)

    @cached_property
    def _least_times(self) -> FloatArray:
        """Return the shortest time of each row and all costlier ones, which rises."""
        least: FloatArray = np.minimum.accumulate(self.time_array[::-1])[::-1]
        return least

    def find_rows(self, share: FloatArray) -> IntArray:
        """Return the last row that takes at most `share`, or else the first row."""
        share = share * (1 + ROUNDING_TOLERANCE)
        end: IntArray = np.searchsorted(self._least_times, share, side="right")
        return np.maximum(end - 1, 0)

    def find_fitting_rows(self, row: IntArray, fits: BoolArray | None) -> IntArray:
        """Return the last row up to `row` that fits in memory, or else the first that does."""
        if fits is None:
            return row
        rows = np.arange(len(self.shares))
        fits = np.broadcast_to(fits, (len(row), len(rows)))
        last = np.where(fits & (rows <= row[:, None]), rows, -1).max(axis=1)
        return np.asarray(np.where(last < 0, fits.argmax(axis=1), last))

    def choose(self, status: DeviceStatus, max_macs: FloatArray) -> RowChoice:
        """Return the largest row that each device has time for, or else the first.

        `max_macs` are those of the full network in that time. Rows that do not fit in a device's
        memory are left out.
        """
        row = self.find_fitting_rows(self.find_rows(max_macs / status.full_macs), status.fits)
        is_short = max_macs / status.full_macs * (1 + ROUNDING_TOLERANCE) < self.time_array[row]
        return RowChoice(row, self.share_array[row] * status.full_macs, is_short)


@dataclass(frozen=True)
class PerBatch:
    """Choose a row before every mini-batch from the current speed, as DISTREAL does.

    No row after `last_row` is chosen. With the budget `unlimited`, all choose the last one.

    >>> from pliant.devices import CostRows, PerBatch
    >>> PerBatch(CostRows((0.25, 0.5, 1.0)), budget="paced").is_per_round
    False
    """

    rows: CostRows
    budget: AnyBudget = "as-written"
    last_row: int | None = None
    is_per_round: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.budget != "unlimited":
            self.rows.check_rising()

    def choose(self, status: DeviceStatus) -> RowChoice:
        choice = self.rows.choose(status, compute_budget(status, self.budget))
        if self.last_row is None:
            return choice
        row = np.minimum(choice.row, self.last_row)
        row = self.rows.find_fitting_rows(row, status.fits)
        return RowChoice(row, self.rows.share_array[row] * status.full_macs, choice.is_short)


@dataclass(frozen=True)
class PerRound:
    """Choose one row per round, for `margin` times the budget at the round's starting speed.

    If the subnet itself is sent, the time that it takes to send it counts as well.

    >>> from pliant.devices import CostRows, PerRound
    >>> PerRound(CostRows((0.25, 0.5, 1.0)), margin=0.7).is_per_round
    True
    """

    rows: CostRows
    margin: float = 1.0
    is_per_round: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.rows.check_rising()

    def choose(self, status: DeviceStatus) -> RowChoice:
        if status.link_seconds_of is None:
            return self.rows.choose(status, self.margin * compute_budget(status, "paced"))
        times, scale = self.rows.time_array, self.margin * status.speed / status.full_macs_left
        row = self.rows.find_rows(scale * status.round_seconds)
        while True:  # a smaller row is also sent faster
            row = self.rows.find_fitting_rows(row, status.fits)
            seconds = status.round_seconds - status.link_seconds_of(row)
            is_short = scale * seconds * (1 + ROUNDING_TOLERANCE) < times[row]
            smaller = self.rows.find_fitting_rows(np.maximum(row - is_short, 0), status.fits)
            if not (smaller < row).any():
                return RowChoice(row, self.rows.share_array[row] * status.full_macs, is_short)
            row = np.minimum(smaller, row)


@dataclass(frozen=True)
class PerDevice:
    """Give every device a row for good, in turn by their numbers.

    >>> from pliant.devices import CostRows, PerDevice
    >>> PerDevice(CostRows((0.25, 1.0))).is_per_round
    True
    """

    rows: CostRows
    is_per_round: ClassVar[bool] = True

    def choose(self, status: DeviceStatus) -> RowChoice:
        row = status.devices % len(self.rows.shares)
        row = self.rows.find_fitting_rows(row, status.fits)
        return RowChoice(row, self.rows.share_array[row] * status.full_macs)


FULL_NETWORK = PerRound(CostRows((1.0,)))  # the full network, whatever the speed


@dataclass(frozen=True, eq=False)
class FixedChoice:
    """Repeat for the whole round a choice made at its start, so that packing can begin early."""

    status: DeviceStatus
    choice: RowChoice
    is_per_round: ClassVar[bool] = True

    def choose(self, status: DeviceStatus) -> RowChoice:
        order = np.argsort(self.status.devices)
        index = order[np.searchsorted(self.status.devices, status.devices, sorter=order)]
        share = self.choice.macs[index] / self.status.full_macs[index]
        is_short = None if self.choice.is_short is None else self.choice.is_short[index]
        return RowChoice(self.choice.row[index], share * status.full_macs, is_short)
