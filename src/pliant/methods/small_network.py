"""The small network: every device trains the same narrow network, whatever its resources.

A baseline for methods that let fast devices train more.
"""

from typing import ClassVar

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import (
    CoverageState,
    Updates,
    Weighting,
    open_stream,
    silence_untrained,
    track_coverage,
)
from pliant.methods.base import LocalTraining, TaskKey, TaskKeys
from pliant.methods.filter_orders import (
    Width,
    count_width_filters,
    make_width_table,
    select_width,
)
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Value


class SmallNetwork(Value, frozen=True, tag="small"):
    """Train the first filters of every site only; the others stay silent.

    >>> import pliant as pl
    >>> pl.SmallNetwork(width=0.5).weighting
    'samples'
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    width: Width = 0.5
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerRound(CostRows(make_width_table(net, (self.width,)).shares))

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return select_width(net, (self.width,), row)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return self.max_filters(net)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_width_filters(net, (self.width,))

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return self.select_subnet(net, row, key, 0)

    def init_state(self, params: Params) -> CoverageState:
        return CoverageState(params)

    def merge(self, net: Elastic, state: CoverageState, updates: Updates) -> CoverageState:
        stream = open_stream(updates)
        merged = merge_average(self.server, net, state, stream, self.weighting)
        return silence_untrained(net, track_coverage(merged, stream.seen))
