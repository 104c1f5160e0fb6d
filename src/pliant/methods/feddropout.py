"""Federated Dropout: each device trains its own random sub-network for one round.

Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements",
2018; with a rate per device by its resources, as in Rapp et al., DISTREAL, AAAI 2022.
"""

from typing import ClassVar, Literal

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import Updates, Weighting, cover_sent
from pliant.methods.base import LocalTraining, ServerState, TaskKey, TaskKeys
from pliant.methods.filter_orders import (
    Width,
    make_device_order,
    make_fine_widths,
    make_round_order,
    make_width_table,
    select_prefix,
)
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.subnet import Subnet
from pliant.value import Positive, Value


class FedDropout(Value, frozen=True, tag="feddropout"):
    """Send each device a random subnet that fits its speed; average each coordinate over holders.

    >>> import pliant as pl
    >>> pl.FedDropout(margin=0.7).merging
    'counts'
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    min_width: Width = 0.25  # smallest share of a site's filters
    margin: Positive = 1.0  # share of the initial speed to plan for
    masks: Literal["device", "round"] = "device"  # one draw per device, or one per round
    scaled: bool = True  # rescale kept filters, as in dropout
    merging: Literal["counts", "mean"] = "counts"  # mean: absent coordinates count as unchanged
    weighting: Weighting = "equal"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerRound(CostRows(self._make_table(net).shares), self.margin)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        if self.masks == "device":
            order = make_device_order(net, key)
        else:
            order = make_round_order(net, key.seed, key.round)
        return select_prefix(net, self._make_table(net).rates[row], order, self.scaled)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return self.select_subnet(net, row, key, 0)

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        cover = cover_sent if self.merging == "counts" else None
        return merge_average(self.server, net, state, updates, self.weighting, cover)

    def _make_table(self, net: Elastic) -> ParetoTable:
        return make_width_table(net, make_fine_widths(self.min_width))
