"""Everything about a search: by which algorithm, for what objective, at what cost."""

from typing import Annotated, Literal

from msgspec import Meta

from pliant.explore.fast import Fast
from pliant.explore.nsga2 import Nsga2, Random, Uniform
from pliant.explore.objective import Objective
from pliant.explore.profile import Profile
from pliant.value import Count, Value

AnySearch = Fast | Nsga2 | Random | Uniform


class Exploration(Value, frozen=True):
    """What is searched for and how.

    >>> import pliant as pl
    >>> pl.Exploration(by=pl.Nsga2(population=32), rows=32).rows
    32
    """

    by: AnySearch = Fast()
    objective: Objective = Objective()
    seed: int = 0  # of the search and its short trainings
    highest: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.5  # rate: beyond it accuracy suffers, §3
    normalisers: Count = 10  # seeds at which the two corners are measured
    fresh: Count = 5  # seeds at which the front is measured again
    rows: Annotated[int, Meta(ge=2)] = 64
    cost: Literal["macs", "seconds"] = "macs"
    profile: Profile | None = None  # of a device: gives the seconds of a step
    full: Nsga2 = Nsga2()  # what `--full` runs in the place of `by`

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.cost == "seconds" and self.profile is None:
            raise ValueError("Expected a profile where cost is seconds: run `pliant bench profile`")
