"""The sandwich rule: every step trains the widest, the narrowest and a random width at once.

Yu, Huang, "Universally slimmable networks and improved training techniques", ICCV 2019.
"""

from collections.abc import Iterable
from itertools import count
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import (
    CoverageState,
    Updates,
    Weighting,
    cover_sent,
    open_stream,
    silence_untrained,
    track_coverage,
)
from pliant.methods.base import LocalTraining, Step, Task, TaskKey, Update, train_locally
from pliant.methods.filter_orders import (
    Widths,
    count_width_filters,
    make_width_table,
    select_width,
)
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params
from pliant.value import Positive, Value


class Sandwich(Value, frozen=True, tag="sandwich"):
    """Train prefixes of several widths in every step and sum their gradients.

    The widest that fits at the start of the round learns from the labels; the narrowest and one
    between them, drawn for each step, learn from the widest. A step costs all three passes. Filters
    that no device has trained are silent.

    >>> import pliant as pl
    >>> pl.Sandwich(widths=(0.5, 1.0)).weighting
    'samples'
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    widths: Widths = (0.25, 0.5, 0.75, 1.0)
    margin: Positive = 1.0
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        shares = make_width_table(net, self.widths).shares
        costs = [
            share + (shares[0] if row else 0.0) + sum(shares[1:row]) / max(1, row - 1)
            for row, share in enumerate(shares)
        ]
        return PerRound(CostRows(tuple(costs)), self.margin)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return select_width(net, self.widths, row)

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return select_width(net, self.widths, row)

    def max_filters(self, net: Elastic) -> IntArray:
        return count_width_filters(net, self.widths)

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        subnets = [select_width(net, self.widths, row), *self._list_narrow(net, row, key, step)]
        return sum(net.macs(subnet, training=True) for subnet in subnets)

    def init_state(self, params: Params) -> CoverageState:
        return CoverageState(params)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        numbers = count()

        def train_all(trainer: SubnetTrainer, step: Step) -> Tensor:
            targets: list[Tensor] = []

            def compute_widest_loss(output: Tensor) -> Tensor:
                targets.append(output.detach().softmax(dim=1))
                return F.cross_entropy(output, step.y)

            trainer.switch(step.subnet)
            loss, grads = trainer.compute_gradients(step.x, compute_widest_loss)
            total = trainer.scatter_subnet(grads)
            for subnet in self._list_narrow(net, step.row, task.key, next(numbers)):
                trainer.switch(subnet)
                _, grads = trainer.compute_gradients(
                    step.x, lambda output: F.cross_entropy(output, targets[0])
                )
                total = list(torch._foreach_add(total, trainer.scatter_subnet(grads)))
            trainer.switch(step.subnet)
            trainer.apply_gradients(trainer.gather_subnet(total), lr=task.lr)
            return loss

        return train_locally(net, task, steps, self.local.optimiser, step_fn=train_all)

    def merge(self, net: Elastic, state: CoverageState, updates: Updates) -> CoverageState:
        stream = open_stream(updates)
        merged = merge_average(self.server, net, state, stream, self.weighting, cover_sent)
        return silence_untrained(net, track_coverage(merged, stream.seen))

    def _list_narrow(self, net: Elastic, row: int, key: TaskKey, step: int) -> list[Subnet]:
        """Return the narrowest and a random subnet below the widest, if there are any."""
        rows = [0] if row else []
        if row > 1:
            rows.append(int(key.rng_stream("width", step).integers(1, row)))
        return [select_width(net, self.widths, number) for number in rows]
