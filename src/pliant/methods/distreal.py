"""DISTREAL: rates from a table by the resources of the moment, new filters each mini-batch.

Rapp et al., "DISTREAL: Distributed resource-aware learning in heterogeneous systems", AAAI 2022.
"""

from collections.abc import Iterable, Sequence

from pliant.devices import PerBatch, Plan, Rows
from pliant.devices.plan import Budget
from pliant.methods.base import Local, Place, State, Step, Task, Update, add_mean, local_training
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Choice, Subnet
from pliant.search.table import Table, fitting
from pliant.value import Value


class Distreal(Value, frozen=True, tag="distreal"):
    """Drop filters at the rates that fit now, and average by reported MACs (Algorithms 1 and 2)."""

    table: Table | None = None  # None: equal rates for all sites
    local: Local = Local()
    budget: Budget = "as-written"
    choice: Choice = "bernoulli"

    def plan(self, net: Elastic) -> Plan:
        return PerBatch(Rows(fitting(self.table, net).shares), self.budget)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        rates = fitting(self.table, net).rates[row]
        return net.draw(rates, place.stream("dropout", step), self.choice)

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return local_training(net, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        return State(add_mean(state.params, updates, [update.macs for update in updates]))
