"""Design-space exploration: rate vectors that cost little and learn much, and tables of them."""

from pliant.explore.exploration import Exploration as Exploration
from pliant.explore.fast import Fast as Fast
from pliant.explore.nsga2 import Nsga2 as Nsga2
from pliant.explore.nsga2 import Random as Random
from pliant.explore.nsga2 import Uniform as Uniform
from pliant.explore.objective import Objective as Objective
from pliant.explore.profile import Profile as Profile
from pliant.explore.profile import load_profile as load_profile
from pliant.explore.table import Table as Table
from pliant.explore.table import uniform_table as uniform_table
from pliant.explore.table_file import load_table as load_table
from pliant.explore.table_file import save_table as save_table
