"""Ditto: besides the shared network, each device trains one of its own that stays near it.

Li et al., "Ditto: Fair and robust federated learning through personalization", ICML 2021.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import (
    LocalTraining,
    ServerState,
    Step,
    Task,
    TaskKey,
    Update,
    make_step,
    train_locally,
)
from pliant.methods.robust import AnyMerge, Mean
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params
from pliant.value import NonNegative, Value


@dataclass(frozen=True)
class PersonalNetwork:
    """A device's own network; empty before its first task."""

    network: Params = field(default_factory=dict)


class Ditto(Value, frozen=True, tag="ditto"):
    """Train the shared network as FedAvg does, and a personal one with a proximal term.

    Every mini-batch trains both, so a step costs twice as much as FedAvg's. The personal loss has
    the extra term ``prox/2 · |v - w_sent|²``: with 0, devices train alone.

    >>> import pliant as pl
    >>> pl.Ditto(prox=0.1).prox
    0.1
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    prox: NonNegative = 1.0
    weighting: Weighting = "samples"
    merging: AnyMerge = Mean()
    server: AnyServerOptimiser = ServerSgd()

    @property
    def delta_weighting(self) -> Weighting | None:
        return self.weighting if isinstance(self.merging, Mean) else None

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerRound(CostRows((2.0,)))

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        return 2.0 * net.macs(net.full, training=True)

    def init_device_state(self, params: Params) -> PersonalNetwork:
        return PersonalNetwork()

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        personal = SubnetTrainer(
            net, task.device_state.network or task.params, self.local.optimiser
        )
        sent = personal.gather_subnet(personal.flatten_params(task.params))

        def stay_near(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
            drift = torch._foreach_sub(params, sent)
            return list(torch._foreach_add(grads, drift, alpha=self.prox))

        train_shared = make_step(task)
        train_personal = make_step(task, make_correction=lambda trainer: stay_near)

        def train_both(trainer: SubnetTrainer, step: Step) -> Tensor:
            train_personal(personal, step)
            return train_shared(trainer, step)

        update = train_locally(net, task, steps, self.local.optimiser, step_fn=train_both)
        return replace(update, device_state=PersonalNetwork(personal.params()))

    def personalise(self, params: Params, device_state: PersonalNetwork) -> Params:
        return device_state.network

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting, rule=self.merging)
