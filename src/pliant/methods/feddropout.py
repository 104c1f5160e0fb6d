"""Federated Dropout: each device trains a random sub-network of its own for a round.

Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements",
2018; a rate per device from its resources, as Rapp et al., DISTREAL, AAAI 2022, extend it.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from pliant.devices import PerRound, Plan, Rows
from pliant.explore.table import Table
from pliant.methods.average import move
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training
from pliant.methods.merge import Weigh, held, mean_change, weight_by
from pliant.methods.parts import common_order, fine_widths, random_order, taken_first, widths_table
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.value import Positive, Value

Width = Annotated[float, Meta(gt=0.0, le=1.0)]


class FedDropout(Value, frozen=True, tag="feddropout"):
    """Send each device a random part that fits its speed; average per coordinate who has it.

    >>> import pliant as pl
    >>> pl.FedDropout(margin=0.7).merging
    'counts'
    """

    local: Local = Local()
    least: Width = 0.25  # of a site's filters: no device trains less
    margin: Positive = 1.0  # plan for this share of what the speed at the start allows
    masks: Literal["device", "round"] = "device"  # one draw each, or one for all of a round
    scaled: bool = True  # survivors stand for the absent, as in dropout
    merging: Literal["counts", "mean"] = "counts"  # mean: what was not sent counts as unchanged
    weigh: Weigh = "equal"

    def plan(self, net: Elastic) -> Plan:
        return PerRound(Rows(self._table(net).shares), self.margin)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        own = self.masks == "device"
        order = random_order(net, place) if own else common_order(net, place.seed, place.round)
        return taken_first(net, self._table(net).rates[row], order, self.scaled)

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return self.subnet(net, row, place, 0)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return local_training(net, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        cover = held if self.merging == "counts" else None
        change = mean_change(net, state.params, updates, weight_by(self.weigh), cover)
        return State(move(state.params, change))

    def _table(self, net: Elastic) -> Table:
        return widths_table(net, fine_widths(self.least))
