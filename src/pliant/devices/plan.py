"""Plans: what a device spends on its next mini-batch, given what it knows now."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.devices.draws import FloatArray, IntArray

BoolArray = NDArray[np.bool_]
Budget = Literal["as-written", "paced"]

# A row that fits exactly must not be lost to rounding. Deadlines allow for twice as much.
ROUNDING = 1e-9


class Moment(NamedTuple):
    """What some devices know just before their mini-batch number `step`, one entry a device.

    Times are seconds since the round's start, speeds MAC/s, and `full` is the cost with the full
    network: of this mini-batch, of all that are left (with this one), of the whole round.

    >>> import numpy as np
    >>> from pliant.devices import Constant, Fleet
    >>> from pliant.engine.schedule import opening
    >>> from pliant.engine.tasks import tasks
    >>> fleet = Fleet(size=1, speed=Constant(0.5))
    >>> opening(fleet, tasks(np.array([0]), batches=2, full=10.0)).speed.tolist()
    [10.0]
    """

    devices: IntArray
    step: int
    now: FloatArray
    speed: FloatArray
    time_left: FloatArray  # to the end of the round, less the upload
    round_seconds: float
    full: FloatArray
    full_left: FloatArray
    full_round: FloatArray


class Choice(NamedTuple):
    """What each device runs next: a row of its plan's table, and the MACs expected of it.

    A plan may have no table: then the row means nothing, and the MACs say all.

    >>> import numpy as np
    >>> from pliant.devices import Choice
    >>> Choice(row=np.array([2]), macs=np.array([5.0])).macs.tolist()
    [5.0]
    """

    row: IntArray
    macs: FloatArray
    is_short: BoolArray | None = None  # the budget is below the smallest row, which is run anyway


class Plan(Protocol):
    """How devices choose; `is_held` plans choose once, in front of a round's first mini-batch."""

    @property
    def is_held(self) -> bool: ...

    def choose(self, moment: Moment) -> Choice: ...


def budget(moment: Moment, kind: Budget) -> FloatArray:
    """Return the MACs that each device may spend on its next mini-batch.

    `as-written` (Rapp et al., Algorithm 1): speed times this mini-batch's fixed slot of the round.
    `paced`: speed times the time left, shared out over the mini-batches that are left.
    """
    if kind == "as-written":
        return moment.speed * (moment.round_seconds * moment.full / moment.full_round)
    return moment.speed * (moment.time_left * moment.full / moment.full_left)


@dataclass(frozen=True)
class Rows:
    """A table of what a mini-batch may cost, as rising shares of the full network's cost.

    >>> import numpy as np
    >>> from pliant.devices import Rows
    >>> rows = Rows((0.25, 0.5, 1.0))
    >>> rows.fit(np.array([0.1, 0.5, 0.99, 2.0])).tolist()  # largest that fits, else the first
    [0, 1, 1, 2]
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        steps = np.diff((0.0, *self.shares))
        if not self.shares or not self.shares[0] > 0 or not (steps >= 0).all():
            raise ValueError(f"Expected rising shares above 0, got {self.shares}")

    @cached_property
    def column(self) -> FloatArray:
        return np.array(self.shares, np.float64)

    def fit(self, share: FloatArray) -> IntArray:
        """Return the last row whose share is not above this one, or the first."""
        place: IntArray = np.searchsorted(self.column, share * (1 + ROUNDING), side="right")
        return np.maximum(place - 1, 0)

    def choose(self, moment: Moment, macs: FloatArray) -> Choice:
        """Return the largest row that costs each device no more than this, or the first."""
        row = self.fit(macs / moment.full)
        is_short = macs / moment.full * (1 + ROUNDING) < self.column[0]
        return Choice(row, self.column[row] * moment.full, is_short)


@dataclass(frozen=True)
class PerBatch:
    """Choose a row in front of every mini-batch from the speed at that time, as DISTREAL does.

    >>> from pliant.devices import PerBatch, Rows
    >>> PerBatch(Rows((0.25, 0.5, 1.0)), budget="paced").is_held
    False
    """

    rows: Rows
    budget: Budget = "as-written"

    @property
    def is_held(self) -> bool:
        return False

    def choose(self, moment: Moment) -> Choice:
        return self.rows.choose(moment, budget(moment, self.budget))


@dataclass(frozen=True)
class PerRound:
    """Choose a row once, for `margin` times what the speed at the round's start would allow.

    >>> from pliant.devices import PerRound, Rows
    >>> PerRound(Rows((0.25, 0.5, 1.0)), margin=0.7).is_held
    True
    """

    rows: Rows
    margin: float = 1.0

    @property
    def is_held(self) -> bool:
        return True

    def choose(self, moment: Moment) -> Choice:
        return self.rows.choose(moment, self.margin * budget(moment, "paced"))


FULL = PerRound(Rows((1.0,)))  # the full network, whatever the speed


@dataclass(frozen=True, eq=False)
class Given:
    """Keep for the round what was chosen at its opening, so that what is sent can be packed first.

    >>> import numpy as np
    >>> from pliant.devices import FULL, Fleet, Given
    >>> from pliant.engine.schedule import opening, timetable
    >>> from pliant.engine.tasks import tasks
    >>> fleet, work = Fleet(size=2), tasks(np.array([1, 0]), batches=1, full=10.0)
    >>> moment = opening(fleet, work)
    >>> timetable(fleet, Given(moment, FULL.choose(moment)), work).useful.tolist()
    [10.0, 10.0]
    """

    moment: Moment
    choice: Choice

    @property
    def is_held(self) -> bool:
        return True

    def choose(self, moment: Moment) -> Choice:
        order = np.argsort(self.moment.devices)
        place = order[np.searchsorted(self.moment.devices, moment.devices, sorter=order)]
        share = self.choice.macs[place] / self.moment.full[place]
        short = self.choice.is_short
        is_short = None if short is None else short[place]
        return Choice(self.choice.row[place], share * moment.full, is_short)
