"""DISTREAL: rates from a table by the resources of the moment, new filters each mini-batch.

Rapp et al., "DISTREAL: Distributed resource-aware learning in heterogeneous systems", AAAI 2022.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from pliant.devices import Plan
from pliant.devices.plan import Budget
from pliant.explore.table import Table, fitting
from pliant.methods.adaptive import Merging, kept, merged, plan_of, priced
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Choice, Subnet
from pliant.value import Positive, Value


class Distreal(Value, frozen=True, tag="distreal"):
    """Drop filters at the rates that fit now, and average by reported MACs (Algorithms 1 and 2).

    The last fields are its ablations: equal rates for all sites in the place of the table; filters
    that are the first of one random order a round; rates that are chosen once, at the round's
    start, for `margin` times the speed; another merge.

    >>> import pliant as pl
    >>> pl.Distreal(budget="paced", local=pl.Local(batch=16)).merging
    'macs'
    """

    table: Table | None = None  # None: equal rates for all sites
    local: Local = Local()
    budget: Budget = "as-written"
    choice: Choice = "bernoulli"
    rates: Literal["table", "uniform"] = "table"
    filters: Literal["batch", "round"] = "batch"
    adapts: bool = True
    margin: Positive = 1.0
    merging: Merging = "macs"

    def plan(self, net: Elastic) -> Plan:
        return plan_of(self._table(net), self.budget, adapts=self.adapts, margin=self.margin)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        rates = self._table(net).rates[row]
        if self.filters == "batch":
            return net.draw(rates, place.stream("dropout", step), self.choice)
        return kept(net, rates, place, "round", scaled=True)

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        is_fixed = self.filters == "round" and not self.adapts
        return self.subnet(net, row, place, 0) if is_fixed else None

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return local_training(net, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        return State(merged(net, state.params, updates, self.merging))

    def _table(self, net: Elastic) -> Table:
        table = fitting(None if self.rates == "uniform" else self.table, net)
        return priced(net, table, self.filters)
