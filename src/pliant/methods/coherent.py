"""Coherent dropout: DISTREAL's freedom inside the round, with filters that stay put.

pliant's own: Federated Dropout (Caldas et al., 2018) or FjORD (Horváth et al., NeurIPS 2021) while
resources are constant, DISTREAL (Rapp et al., AAAI 2022) when they change.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from pliant.devices import Plan
from pliant.devices.plan import Budget
from pliant.explore.table import Table, fitting
from pliant.methods.adaptive import Merging, kept, merged, plan_of, priced
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training
from pliant.methods.merge import FILTERS, seen_filters, widest_of
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.value import Value


class Coherent(Value, frozen=True, tag="coherent"):
    """Shrink and grow along one order of filters; average per coordinate by the steps it had.

    >>> import pliant as pl
    >>> pl.Coherent(filters="prefix").budget
    'paced'
    """

    table: Table | None = None  # None: equal rates for all sites
    local: Local = Local()
    budget: Budget = "paced"
    filters: Literal["round", "prefix"] = "round"  # a random order a round, or their own
    scaled: bool = True  # survivors stand for the absent
    merging: Merging = "counts"

    def plan(self, net: Elastic) -> Plan:
        return plan_of(self._table(net), self.budget, adapts=True)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        rates = self._table(net).rates[row]
        return kept(net, rates, place, self.filters, scaled=self.scaled)

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None

    def widest(self, net: Elastic, state: State) -> Subnet | None:
        return widest_of(net, state)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return local_training(net, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        params = merged(net, state.params, updates, self.merging)
        return State(params, {FILTERS: seen_filters(state, updates)})

    def _table(self, net: Elastic) -> Table:
        return priced(net, fitting(self.table, net), self.filters)
