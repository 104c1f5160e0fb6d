"""FedAsync: mix the network of each device into the server's as soon as it arrives.

Xie, Koyejo and Gupta, "Asynchronous federated optimization", OPT 2020.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from pliant.methods.base import LocalTraining, ServerState, Step, Task, Update, train_corrected
from pliant.methods.staleness import AnyStaleness, PolynomialStaleness
from pliant.methods.verbs import Work
from pliant.nn.elastic import Elastic
from pliant.value import Count, NonNegative, Value


class FedAsync(Value, frozen=True, tag="fedasync"):
    """Move to ``(1 - a) · w + a · w_device`` for each update, with a = alpha × its weight.

    Devices train with the extra term ``rho/2 · |w - w_sent|²``. Neither the number of devices nor
    of their samples changes a.

    >>> import pliant as pl
    >>> pl.FedAsync(staleness=pl.HingeStaleness()).alpha
    0.6
    """

    buffer: ClassVar[int] = 1

    alpha: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.6
    rho: NonNegative = 0.005
    staleness: AnyStaleness = PolynomialStaleness()
    local: LocalTraining = LocalTraining()
    concurrency: Count | None = None  # tasks in flight; None: `per_round`
    work: Work = "pass"

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        def add_proximal_term(
            grads: list[Tensor], params: list[Tensor], sent: list[Tensor]
        ) -> Sequence[Tensor]:
            return torch._foreach_add(grads, torch._foreach_sub(params, sent), alpha=self.rho)

        optimiser, sent = self.local.optimiser, task.params
        return train_corrected(net, task, steps, optimiser, sent, add_proximal_term)

    def merge(self, net: Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        for update in updates:
            share = self.alpha * self.staleness.weigh(update.staleness)
            params = {
                name: _mix(tensor, update.base[name], update.delta[name], share)
                for name, tensor in state.params.items()
            }
            state = replace(state, params=params)
        return state


def _mix(tensor: Tensor, base: Tensor, delta: Tensor, share: float) -> Tensor:
    """Return the mean of a tensor and the trained one; integers are rounded."""
    trained = base.to(torch.float64) + delta
    mixed = (1.0 - share) * tensor.to(torch.float64) + share * trained
    return (mixed if tensor.is_floating_point() else mixed.round()).to(tensor.dtype)
