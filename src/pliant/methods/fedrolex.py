"""FedRolex: a window of filters that rolls on by one every round.

Alam et al., "FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction",
NeurIPS 2022.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta

from pliant.devices import PerRound, Plan, Rows
from pliant.explore.table import Table
from pliant.methods.average import move
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training
from pliant.methods.merge import Weigh, held, mean_change, weight_by
from pliant.methods.parts import fine_widths, rolled_order, taken_first, widths_table
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.value import Positive, Value

Width = Annotated[float, Meta(gt=0.0, le=1.0)]


class FedRolex(Value, frozen=True, tag="fedrolex"):
    """Train a window of each site's filters; all devices of a round begin at the same filter.

    >>> import pliant as pl
    >>> pl.FedRolex(widths=(0.25, 0.5, 1.0)).widths[-1]
    1.0
    """

    local: Local = Local()
    widths: tuple[Width, ...] = ()  # like (0.0625, 0.125, 0.25, 0.5, 1); none: any from `least` on
    least: Width = 0.25
    margin: Positive = 1.0
    scaled: bool = True  # HeteroFL's scaler, which its public code keeps
    weigh: Weigh = "equal"

    def plan(self, net: Elastic) -> Plan:
        return PerRound(Rows(self._table(net).shares), self.margin)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        order = rolled_order(net, place.round)
        return taken_first(net, self._table(net).rates[row], order, self.scaled)

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return self.subnet(net, row, place, 0)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return local_training(net, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        change = mean_change(net, state.params, updates, weight_by(self.weigh), held)
        return State(move(state.params, change))

    def _table(self, net: Elastic) -> Table:
        return widths_table(net, self.widths or fine_widths(self.least))
