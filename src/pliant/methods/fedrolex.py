"""FedRolex: train a window of filters that moves on by one every round.

Alam et al., "FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction",
NeurIPS 2022.
"""

from typing import ClassVar

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import Updates, Weighting, cover_sent
from pliant.methods.base import LocalTraining, ServerState, TaskKey, TaskKeys
from pliant.methods.filter_orders import (
    Width,
    make_fine_widths,
    make_rolling_order,
    make_width_table,
    select_prefix,
)
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.subnet import Subnet
from pliant.value import Positive, Value


class FedRolex(Value, frozen=True, tag="fedrolex"):
    """Train a window of each site's filters that starts at the same filter on all devices.

    >>> import pliant as pl
    >>> pl.FedRolex(widths=(0.25, 0.5, 1.0)).widths[-1]
    1.0
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    widths: tuple[Width, ...] = ()  # such as (0.25, 0.5, 1.0); empty: any from `min_width` up
    min_width: Width = 0.25
    margin: Positive = 1.0
    scaled: bool = True  # HeteroFL's scaler, as in the authors' code
    weighting: Weighting = "equal"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerRound(CostRows(self._make_table(net).shares), self.margin)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        order = make_rolling_order(net, key.round)
        return select_prefix(net, self._make_table(net).rates[row], order, self.scaled)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return self.select_subnet(net, row, key, 0)

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting, cover_sent)

    def _make_table(self, net: Elastic) -> ParetoTable:
        return make_width_table(net, self.widths or make_fine_widths(self.min_width))
