"""Search for rate vectors that cost little and learn much, and build tables of them."""

from pliant.table_search.nsga2 import Nsga2 as Nsga2
from pliant.table_search.nsga2 import RandomSearch as RandomSearch
from pliant.table_search.nsga2 import UniformRates as UniformRates
from pliant.table_search.settings import SearchSettings as SearchSettings
from pliant.table_search.short_training import ShortTrainingSettings as ShortTrainingSettings
from pliant.table_search.step_time import StepTimeModel as StepTimeModel
from pliant.table_search.step_time import load_step_time_model as load_step_time_model
from pliant.table_search.surrogate_search import SurrogateSearch as SurrogateSearch
