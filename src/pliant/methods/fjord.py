"""FjORD: ordered dropout with a new random width for every mini-batch.

Horváth et al., "FjORD: Fair and accurate federated learning under heterogeneous targets with
ordered dropout", NeurIPS 2021.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.devices import BudgetPolicy, CostRows, PerBatch, PerRound
from pliant.devices.budget import Budget
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import (
    CoverageState,
    Updates,
    Weighting,
    cover_sent,
    cover_trained,
    open_stream,
    track_coverage,
)
from pliant.methods.base import LocalTraining, Step, Task, TaskKey, Update, train_locally
from pliant.methods.filter_orders import Width, make_width_table, select_prefix
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params
from pliant.value import Positive, Value


class Fjord(Value, frozen=True, tag="fjord"):
    """Train prefixes of random width, up to the largest that fits at the start of the round.

    With `distilled`, the device's widest network teaches the sampled one in the same step. With
    `dynamic`, the width is not random but the largest that fits current resources.

    >>> import pliant as pl
    >>> pl.Fjord(dynamic=True, budget="paced").widths
    (0.2, 0.4, 0.6, 0.8, 1.0)
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    widths: tuple[Width, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    distilled: bool = False
    dynamic: bool = False
    budget: Budget = "as-written"  # of the dynamic variant
    margin: Positive = 1.0
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.widths or (self.distilled and self.dynamic):
            raise ValueError("Expected at least one width, and not both `distilled` and `dynamic`")

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        table = self._make_table(net)
        if self.dynamic:
            return PerBatch(CostRows(table.shares), self.budget)
        rows = range(len(table.shares))
        costs = [sum(table.shares[: row + 1]) / (row + 1) for row in rows]  # mean of all widths
        if self.distilled:
            costs = [cost + table.shares[row] for row, cost in enumerate(costs)]
        return PerRound(CostRows(tuple(costs)), self.margin)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        if not self.dynamic:
            row = int(key.rng_stream("width", step).integers(row + 1))
        return self._select_prefix(net, row)

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return None if self.dynamic else self._select_prefix(net, row)

    def max_filters(self, net: Elastic) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        subnets = [self.select_subnet(net, row, key, step)]
        if self.distilled:
            subnets.append(self._select_prefix(net, row))
        return sum(net.macs(subnet, training=True) for subnet in subnets)

    def init_state(self, params: Params) -> CoverageState:
        return CoverageState(params)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        def distil(trainer: SubnetTrainer, step: Step) -> Tensor:
            assert task.subnet is not None
            targets: list[Tensor] = []

            def teacher_loss(output: Tensor) -> Tensor:
                targets.append(output.detach().softmax(dim=1))
                return F.cross_entropy(output, step.y)

            trainer.switch(task.subnet)
            loss, grads = trainer.compute_gradients(step.x, teacher_loss)
            full = trainer.scatter_subnet(grads)
            trainer.switch(step.subnet)
            _, grads = trainer.compute_gradients(
                step.x, lambda output: F.cross_entropy(output, targets[0])
            )
            full = list(torch._foreach_add(full, trainer.scatter_subnet(grads)))
            trainer.switch(task.subnet)
            trainer.apply_gradients(trainer.gather_subnet(full), lr=task.lr)
            return loss

        step_fn = distil if self.distilled else None
        return train_locally(net, task, steps, self.local.optimiser, step_fn=step_fn)

    def merge(self, net: Elastic, state: CoverageState, updates: Updates) -> CoverageState:
        stream = open_stream(updates)
        cover = cover_trained if self.dynamic else cover_sent
        merged = merge_average(self.server, net, state, stream, self.weighting, cover)
        return track_coverage(merged, stream.seen)

    def _select_prefix(self, net: Elastic, row: int) -> Subnet:
        return select_prefix(net, self._make_table(net).rates[row])

    def _make_table(self, net: Elastic) -> ParetoTable:
        return make_width_table(net, self.widths)
