"""Elastic batch: a slow device trains the full network on fewer samples per step.

A baseline for methods that adapt the network instead: every device makes all its steps in time.
"""

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from pliant.data import MIN_SAMPLES, InputScale
from pliant.devices import BudgetPolicy, CostRows, PerBatch
from pliant.devices.budget import Budget
from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import (
    LocalTraining,
    ServerState,
    Step,
    Task,
    Update,
    make_cross_entropy,
    train_locally,
)
from pliant.methods.filter_orders import Width
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.trainer import SubnetTrainer
from pliant.value import NonNegative, Value


class ElasticBatch(Value, frozen=True, tag="elastic_batch"):
    """Take as many samples per step as current resources allow.

    The learning rate of a step is multiplied by its share of the samples to the `power`.

    >>> import pliant as pl
    >>> pl.ElasticBatch(least=0.25).power
    0.5
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    least: Width = 0.125  # share of the samples
    power: NonNegative = 0.5  # 0: the same learning rate for all, 1: in proportion
    budget: Budget = "paced"
    weighting: Weighting = "equal"  # all make the same number of steps
    server: AnyServerOptimiser = ServerSgd()

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the shares of samples to choose from."""
        batch = self.local.batch
        fewest = min(batch, max(MIN_SAMPLES, round(self.least * batch)))
        return tuple(count / batch for count in range(fewest, batch + 1))

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerBatch(CostRows(self.shares), self.budget)

    def scale_inputs(self, net: Elastic, row: int) -> InputScale:
        return InputScale(batch=self.shares[row])

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        def run_step(trainer: SubnetTrainer, step: Step) -> Tensor:
            lr = task.lr * step.scale.batch**self.power
            return trainer.step(step.x, make_cross_entropy(step.y), lr=lr)

        return train_locally(net, task, steps, self.local.optimiser, step_fn=run_step)

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting)
