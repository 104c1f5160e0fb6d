"""Multi-head networks: devices share the first layers; each has a head of the size it can afford.

Rapp, Khalili, Henkel, "Distributed learning on heterogeneous resource-constrained devices", 2020.
The paper leaves the heads open; here they are the same layers at several widths.
"""

from collections.abc import Iterable
from typing import ClassVar

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import LocalTraining, ServerState, Step, Task, TaskKey, TaskKeys, Update
from pliant.methods.fedper import PersonalLayers, check_layers, list_personal, train_personal
from pliant.methods.filter_orders import Width, make_count_table, select_prefix
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.net_cache import cache_on_net
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Positive, Value


class MultiHead(Value, frozen=True, tag="multihead"):
    """Average the shared layers; a device trains its own head at the largest width that fits.

    `head` has the names of the layers or modules of the head, by default all from the last site on.
    Heads are never averaged: a device keeps its own, and trains more or less of it as its speed at
    the start of a round allows.

    >>> import pliant as pl
    >>> pl.MultiHead(head=("features.3", "classifier")).widths
    (0.25, 0.5, 1.0)
    """

    merges_stream: ClassVar[bool] = True

    head: tuple[str, ...] = ()
    local: LocalTraining = LocalTraining()
    widths: tuple[Width, ...] = (0.25, 0.5, 1.0)
    margin: Positive = 1.0
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.widths:
            raise ValueError("Expected at least one width, got none - at `$.widths` of MultiHead")

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerRound(CostRows(self._make_table(net).shares), self.margin)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return select_prefix(net, self._make_table(net).rates[row])

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return self.max_filters(net)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)

    def init_device_state(self, params: Params) -> PersonalLayers:
        check_layers(params, self.head)
        return PersonalLayers()

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return train_personal(net, task, steps, self.local.optimiser, _find_head(net, self.head))

    def personalise(self, params: Params, device_state: PersonalLayers) -> Params:
        return params | device_state.layers

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting)

    def _make_table(self, net: Elastic) -> ParetoTable:
        return _make_head_table(net, _find_head(net, self.head), self.widths)


@cache_on_net
def _find_head(net: Elastic, head: tuple[str, ...]) -> tuple[str, ...]:
    if head or not net.sites:
        return head
    layers = list(dict.fromkeys(n.rpartition(".")[0] for n, _ in net.module.named_parameters()))
    return tuple(layers[layers.index(net.sites[-1].layers[0]) :])


@cache_on_net
def _make_head_table(net: Elastic, head: tuple[str, ...], widths: tuple[float, ...]) -> ParetoTable:
    """Make a table that narrows the sites of the head only."""
    names = list_personal(net, head)
    in_head = [any(f"{layer}.weight" in names for layer in site.layers) for site in net.sites]
    if not any(in_head) and any(width < 1.0 for width in widths):
        raise ValueError(
            f"Expected layers that can be narrowed in `head`, found none in {', '.join(head)}"
        )
    rates = [tuple(is_head * (1.0 - width) for is_head in in_head) for width in sorted(widths)]
    return make_count_table(net, tuple(rates))
