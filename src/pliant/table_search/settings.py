"""Settings of a search: its algorithm, objective and cost."""

from typing import Annotated, Literal

from msgspec import Meta

from pliant.table_search.nsga2 import Nsga2, RandomSearch, UniformRates
from pliant.table_search.short_training import ShortTrainingSettings
from pliant.table_search.step_time import StepTimeModel
from pliant.table_search.surrogate_search import SurrogateSearch
from pliant.value import Count, Value

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
    rows: Annotated[int, Meta(ge=2)] = 64
    cost: Literal["macs", "seconds"] = "macs"
    profile: StepTimeModel | None = None  # predicts the seconds of a step on a device
    full_algorithm: Nsga2 = Nsga2()  # what `--full` runs instead of `algorithm`

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.cost == "seconds" and self.profile is None:
            raise ValueError("Expected a profile where cost is seconds: run `pliant bench profile`")
