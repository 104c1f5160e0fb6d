"""FjORD: ordered dropout, a width drawn anew for every mini-batch.

Horváth et al., "FjORD: Fair and accurate federated learning under heterogeneous targets with
ordered dropout", NeurIPS 2021.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from pliant.devices import PerBatch, PerRound, Plan, Rows
from pliant.devices.plan import Budget
from pliant.explore.table import Table
from pliant.methods.average import move
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training
from pliant.methods.merge import (
    FILTERS,
    Weigh,
    held,
    mean_change,
    seen_filters,
    touched,
    weight_by,
    widest_of,
)
from pliant.methods.parts import own_order, taken_first, widths_table
from pliant.nn.elastic import Elastic
from pliant.nn.learner import Learner
from pliant.nn.subnet import Subnet
from pliant.value import Positive, Value

Width = Annotated[float, Meta(gt=0.0, le=1.0)]


class Fjord(Value, frozen=True, tag="fjord"):
    """Train a prefix whose width is drawn up to what a device can do at the round's start.

    `distilled` lets the device's widest network teach the drawn one in the same step. `dynamic`
    draws nothing: the width is the largest that fits at the moment.

    >>> import pliant as pl
    >>> pl.Fjord(dynamic=True, budget="paced").widths
    (0.2, 0.4, 0.6, 0.8, 1.0)
    """

    local: Local = Local()
    widths: tuple[Width, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    distilled: bool = False
    dynamic: bool = False
    budget: Budget = "as-written"  # of the dynamic variant
    margin: Positive = 1.0
    weigh: Weigh = "samples"

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.widths or (self.distilled and self.dynamic):
            raise ValueError("Expected a width at least, and not both `distilled` and `dynamic`")

    def plan(self, net: Elastic) -> Plan:
        table = self._table(net)
        if self.dynamic:
            return PerBatch(Rows(table.shares), self.budget)
        rows = range(len(table.shares))
        costs = [sum(table.shares[: row + 1]) / (row + 1) for row in rows]  # of a drawn width
        if self.distilled:
            costs = [cost + table.shares[row] for row, cost in enumerate(costs)]
        return PerRound(Rows(tuple(costs)), self.margin)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        if not self.dynamic:
            row = int(place.stream("width", step).integers(row + 1))
        return self._prefix(net, row)

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None if self.dynamic else self._prefix(net, row)

    def macs(self, net: Elastic, row: int, place: Place, step: int) -> float:
        passes = [self.subnet(net, row, place, step)]
        if self.distilled:
            passes.append(self._prefix(net, row))
        return sum(net.macs(subnet, training=True) for subnet in passes)

    def widest(self, net: Elastic, state: State) -> Subnet | None:
        return widest_of(net, state)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        def taught(learner: Learner, step: Step) -> Tensor:
            assert task.subnet is not None
            lessons: list[Tensor] = []

            def teach(output: Tensor) -> Tensor:
                lessons.append(output.detach().softmax(dim=1))
                return F.cross_entropy(output, step.y)

            learner.switch(task.subnet)
            loss, grads = learner.gradients(step.x, teach)
            full = learner.spread(grads)
            learner.switch(step.subnet)
            _, grads = learner.gradients(step.x, lambda output: F.cross_entropy(output, lessons[0]))
            full = list(torch._foreach_add(full, learner.spread(grads)))
            learner.switch(task.subnet)
            learner.descend(learner.part(full), lr=task.lr)
            return loss

        advance = taught if self.distilled else None
        return local_training(net, task, steps, self.local.optimiser, advance=advance)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        cover = touched if self.dynamic else held
        change = mean_change(net, state.params, updates, weight_by(self.weigh), cover)
        return State(move(state.params, change), {FILTERS: seen_filters(state, updates)})

    def _prefix(self, net: Elastic, row: int) -> Subnet:
        return taken_first(net, self._table(net).rates[row], own_order(net))

    def _table(self, net: Elastic) -> Table:
        return widths_table(net, self.widths)
