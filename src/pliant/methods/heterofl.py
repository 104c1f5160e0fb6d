"""HeteroFL: nested widths, each device the largest that fits at the round's start.

Diao et al., "HeteroFL: Computation and communication efficient federated learning for heterogeneous
clients", ICLR 2021; widths of 0.7 as in Rapp et al., DISTREAL, AAAI 2022.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from pliant.devices import PerRound, Plan, Rows
from pliant.explore.table import Table
from pliant.methods.average import move
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training, stepping
from pliant.methods.merge import (
    FILTERS,
    Weigh,
    held,
    mean_change,
    seen_filters,
    weight_by,
    widest_of,
)
from pliant.methods.parts import fine_widths, own_order, taken_first, widths_table
from pliant.nn.elastic import Elastic
from pliant.nn.learner import Loss
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Count, Positive, Value


class HeteroFl(Value, frozen=True, tag="heterofl"):
    """Train the first filters of every site; average each coordinate over those who have it.

    Widths are s^0, s^1, … for so many levels, or anything between the least and 1 with `fine`.

    >>> import pliant as pl
    >>> method = pl.HeteroFl(s=0.5, levels=3)
    >>> [method.s**level for level in range(method.levels)]
    [1.0, 0.5, 0.25]
    """

    local: Local = Local()
    s: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.7
    levels: Count = 5
    fine: bool = False
    margin: Positive = 1.0
    scaled: bool = True  # the scaler: no effect in front of a batch norm
    masked: bool = False  # leave classes alone that a device does not have (for non-iid data)
    weigh: Weigh = "equal"

    def plan(self, net: Elastic) -> Plan:
        return PerRound(Rows(self._table(net).shares), self.margin)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        return taken_first(net, self._table(net).rates[row], own_order(net), self.scaled)

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return self.subnet(net, row, place, 0)

    def widest(self, net: Elastic, state: State) -> Subnet | None:
        return widest_of(net, state)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        if not self.masked:
            return local_training(net, task, steps, self.local.optimiser)
        owned = torch.zeros(net.plan.shapes[_classifier(net)][0])
        owned[list(task.classes)] = 1.0

        def against(labels: Tensor) -> Loss:
            return lambda output: F.cross_entropy(
                output * owned.to(output), labels
            )  # 0, not -infinity

        advance = stepping(task, against=against)
        update = local_training(net, task, steps, self.local.optimiser, advance=advance)
        return replace(update, extra={"owned": owned})

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        change = mean_change(net, state.params, updates, weight_by(self.weigh), _held)
        return State(move(state.params, change), {FILTERS: seen_filters(state, updates)})

    def _table(self, net: Elastic) -> Table:
        widths = tuple(self.s**level for level in range(self.levels))
        return widths_table(net, fine_widths(widths[-1]) if self.fine else widths)


def _held(net: Elastic, params: Params, update: Update) -> Params:
    """Cover what a device was sent, without the classifier's rows of classes it does not have."""
    cover = held(net, params, update)
    if "owned" in update.extra:
        weight = _classifier(net)
        for name in (weight, f"{weight.removesuffix('weight')}bias"):
            if name in cover:
                rows = (-1, *[1] * (cover[name].ndim - 1))
                cover[name] = cover[name] * (update.extra["owned"] > 0).view(rows)
    return cover


def _classifier(net: Elastic) -> str:
    """Return the name of the last layer's weight: a row for each class."""
    return net.plan.works[-1].layer
