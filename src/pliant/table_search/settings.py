"""Settings of a search: its algorithm, objective and cost."""

from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from pliant.nn.pareto_table import Share
from pliant.table_search.nsga2 import Nsga2, RandomSearch, UniformRates
from pliant.table_search.short_training import ShortTrainingSettings
from pliant.table_search.step_time import StepTimeModel
from pliant.table_search.surrogate_search import SurrogateSearch
from pliant.value import Count, Fraction, Value

AnySearch = SurrogateSearch | Nsga2 | RandomSearch | UniformRates


class SearchSettings(Value, frozen=True):
    """What to search for, and how.

    >>> import pliant as pl
    >>> pl.SearchSettings(algorithm=pl.Nsga2(population=32), rows=32).rows
    32
    """

    algorithm: AnySearch = SurrogateSearch()
    objective: ShortTrainingSettings = ShortTrainingSettings()
    seed: int = 0  # of the search and its short trainings
    highest_rate: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.5  # beyond it accuracy suffers, §3
    corner_seeds: Count = 10  # at which the two corners are measured
    fresh_seeds: Count = 5  # at which the front is measured again
    rows: Annotated[int, Meta(ge=2)] = 64  # per stage
    # vectors with the same rate at all sites, to compare with
    equal_rates: Annotated[int, Meta(ge=0, le=1000)] = 9
    sides: tuple[Count, ...] = ()  # of the images, in pixels, besides the full one
    batch_shares: tuple[Share, ...] = ()  # of the samples of a mini-batch, besides all
    stages: tuple[Fraction, ...] = (1.0,)  # of the snapshot's training: a table for each
    cost: Literal["macs", "seconds"] = "macs"
    profile: StepTimeModel | None = None  # predicts the seconds of a step on a device
    full_algorithm: Nsga2 = Nsga2()  # what `--full` runs instead of `algorithm`

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.cost == "seconds" and self.profile is None:
            raise ValueError("Expected a profile where cost is seconds: run `pliant bench profile`")
        is_rising = all(before < after for before, after in pairwise(self.stages))
        if not self.stages or not is_rising or (len(self.stages) > 1 and self.stages[-1] == 1.0):
            stages = ", ".join(f"{stage:g}" for stage in self.stages)
            raise ValueError(
                "Expected one stage, or rising ones below 1, at which no training is left, "
                f"got {stages or 'none'} - at `$.stages` of SearchSettings"
            )
