"""Tables of rate vectors: what a device may choose from before every mini-batch."""

from pliant.search.table import Table as Table
from pliant.search.table import uniform_table as uniform_table
