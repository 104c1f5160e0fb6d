"""DISTREAL: choose rates from a table by current resources, and new filters per mini-batch.

Rapp et al., "DISTREAL: Distributed resource-aware learning in heterogeneous systems", AAAI 2022.
"""

from typing import ClassVar, Literal

from pliant.data import InputScale
from pliant.devices import BudgetPolicy, CostRows, PerBatch, PerRound
from pliant.devices.budget import Budget
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import LocalTraining, ServerState, TaskKey, TaskKeys
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd
from pliant.methods.table_methods import Merging, make_table, merge_updates, select_ordered_subnet
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import (
    bound_drawn_filters,
    count_drawn_filters,
    count_prefix_filters,
)
from pliant.nn.pareto_table import ParetoTable, linear_table
from pliant.nn.subnet import Sampling, Subnet
from pliant.value import Positive, Value


class Distreal(Value, frozen=True, tag="distreal"):
    """Drop filters at rates that fit current resources; average by reported MACs.

    The fields from `rates` to `merging` are ablations of Algorithms 1 and 2: rates that are equal
    for all sites, or rise linearly with depth, instead of the table's; filters from one random
    order per round; rates chosen once at the start of the round for `margin` times the speed; and
    other merges.

    >>> import pliant as pl
    >>> pl.Distreal(budget="paced", local=pl.LocalTraining(batch=16)).merging
    'macs'
    """

    table: ParetoTable | None = None  # None: equal rates for all sites
    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    budget: Budget = "as-written"
    choice: Sampling = "blocks"
    rates: Literal["table", "uniform", "linear"] = "table"
    filters: Literal["batch", "round"] = "batch"
    adapts: bool = True
    margin: Positive = 1.0
    merging: Merging = "macs"
    server: AnyServerOptimiser = ServerSgd()

    @property
    def delta_weighting(self) -> Weighting | None:
        return None if self.merging == "counts" else self.merging

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        rows = CostRows(self._make_table(net).shares)
        return PerBatch(rows, self.budget) if self.adapts else PerRound(rows, self.margin)

    def scale_inputs(self, net: Elastic, row: int) -> InputScale:
        return InputScale(*self._make_table(net).get_scale(row))

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        rates = self._make_table(net).rates[row]
        if self.filters == "batch":
            return net.draw(rates, key.rng_stream("dropout", step), self.choice)
        return select_ordered_subnet(net, rates, key, "round", scaled=True)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        rates = self._make_table(net).rates
        if self.filters == "round":
            return count_prefix_filters(net, rates)[rows]
        address = ("dropout", step, keys.round)
        devices = keys.devices.tolist()
        return count_drawn_filters(
            net, rates, rows, self.choice, seed=keys.seed, address=address, numbers=devices
        )

    def max_filters(self, net: Elastic) -> IntArray:
        rates = self._make_table(net).rates
        if self.filters == "round":
            return count_prefix_filters(net, rates)
        return bound_drawn_filters(net, rates, self.choice)

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        is_fixed = self.filters == "round" and not self.adapts
        return self.select_subnet(net, row, key, 0) if is_fixed else None

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_updates(self.server, net, state, updates, self.merging)

    def _make_table(self, net: Elastic) -> ParetoTable:
        table = None if self.rates == "uniform" else self.table
        if self.rates == "linear":
            table = linear_table(net, sampling=self.choice)
        return make_table(net, table, self.filters, self.choice)
