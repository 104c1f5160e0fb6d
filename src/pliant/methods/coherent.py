"""Coherent dropout: adapt within the round as DISTREAL does, but keep the order of filters.

pliant's own method. It acts as Federated Dropout (Caldas et al., 2018) or FjORD (Horváth et al.,
NeurIPS 2021) while resources are constant, and as DISTREAL (Rapp et al., AAAI 2022) when they
change.
"""

from typing import ClassVar, Literal

from pliant.data import InputScale
from pliant.devices import BudgetPolicy, CostRows, PerBatch
from pliant.devices.budget import Budget
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import CoverageState, Updates, open_stream, track_coverage
from pliant.methods.base import LocalTraining, TaskKey, TaskKeys
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd
from pliant.methods.table_methods import Merging, make_table, merge_updates, select_ordered_subnet
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Value


class Coherent(Value, frozen=True, tag="coherent"):
    """Shrink and grow along one order of filters; average coordinates by steps trained.

    >>> import pliant as pl
    >>> pl.Coherent(filters="prefix").budget
    'paced'
    """

    table: ParetoTable | None = None  # None: equal rates for all sites
    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    budget: Budget = "paced"
    filters: Literal["round", "prefix"] = "round"  # a random order per round, or the natural one
    scaled: bool = True  # rescale kept filters, as in dropout
    merging: Merging = "counts"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerBatch(CostRows(self._make_table(net).shares), self.budget)

    def scale_inputs(self, net: Elastic, row: int) -> InputScale:
        return InputScale(*self._make_table(net).get_scale(row))

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        rates = self._make_table(net).rates[row]
        return select_ordered_subnet(net, rates, key, self.filters, scaled=self.scaled)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)

    def init_state(self, params: Params) -> CoverageState:
        return CoverageState(params)

    def merge(self, net: Elastic, state: CoverageState, updates: Updates) -> CoverageState:
        stream = open_stream(updates)
        merged = merge_updates(self.server, net, state, stream, self.merging)
        return track_coverage(merged, stream.seen)

    def _make_table(self, net: Elastic) -> ParetoTable:
        return make_table(net, self.table, self.filters)
