"""FedNova: normalise each delta by its number of steps, so that devices with more do not bias.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization",
NeurIPS 2020; for SGD with or without momentum.
"""

from fractions import Fraction
from typing import ClassVar

from pliant.methods.aggregation import Updates, average_deltas, open_stream
from pliant.methods.base import LocalTraining, ServerState, Update
from pliant.methods.server_optimisers import (
    AnyServerOptimiser,
    ServerSgd,
    measure_squares,
    take_server_step,
)
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Sgd
from pliant.value import Value


class FedNova(Value, frozen=True, tag="fednova"):
    """Average deltas per step, weighted by data, and multiply by the mean number of steps.

    With data shares p and effective steps a, the merged delta is ``(sum p a) · sum p delta / a``.
    Without momentum a is the number of steps; with it, later steps count more.

    >>> import pliant as pl
    >>> pl.FedNova(local=pl.LocalTraining(batch=16)).local.batch
    16
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    server: AnyServerOptimiser = ServerSgd()

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not isinstance(self.local.optimiser, Sgd):
            raise ValueError("Expected SGD, as the steps of other optimisers have no known weight")

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        assert isinstance(self.local.optimiser, Sgd)
        momentum = self.local.optimiser.momentum

        def weight_per_step(update: Update) -> Fraction:
            return update.num_samples / _count_effective_steps(update.steps, momentum)

        stream = open_stream(updates)
        squares = measure_squares(self.server, net, stream)
        delta = average_deltas(net, state.params, stream, weight_per_step)
        if not stream.seen:
            return state
        samples = sum(update.num_samples for update in stream.seen)
        steps = sum(
            _count_effective_steps(update.steps, momentum) * update.num_samples / samples
            for update in stream.seen
        )
        # 1 if all devices took the same number of steps
        scale = steps * sum(weight_per_step(update) for update in stream.seen) / samples
        seen, weight = stream.seen, weight_per_step
        return take_server_step(
            self.server, net, state, delta, seen, weight, squares, scale=float(scale)
        )


def _count_effective_steps(steps: int, momentum: float) -> Fraction:
    """Return the sum of the weights with which a device's gradients add up to its delta.

    A gradient acts on all later steps, by 1 + rho + rho² + … with momentum rho.
    """
    rest = momentum * (1 - momentum**steps) / (1 - momentum)
    return Fraction((steps - rest) / (1 - momentum))
