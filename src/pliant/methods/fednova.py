"""FedNova: normalise each delta by its number of steps, so that devices with more do not bias.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization",
NeurIPS 2020; the rule without momentum.
"""

from collections.abc import Sequence
from fractions import Fraction

from pliant.methods.aggregation import average_deltas
from pliant.methods.base import LocalTraining, ServerState, Update
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, take_server_step
from pliant.nn.elastic import Elastic
from pliant.value import Value


class FedNova(Value, frozen=True, tag="fednova"):
    """Average deltas per step, weighted by data, and multiply by the mean number of steps.

    With data shares p and steps tau, the merged delta is ``(sum p tau) · sum p delta / tau``.

    >>> import pliant as pl
    >>> pl.FedNova(local=pl.LocalTraining(batch=16)).local.batch
    16
    """

    local: LocalTraining = LocalTraining()
    server: AnyServerOptimiser = ServerSgd()

    def merge(self, net: Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        if not updates:
            return state

        def weight_per_step(update: Update) -> Fraction:
            return Fraction(update.num_samples, update.steps)

        samples = sum(update.num_samples for update in updates)
        steps = sum(Fraction(update.num_samples * update.steps, samples) for update in updates)
        # 1 if all devices took the same number of steps
        scale = steps * sum(weight_per_step(update) for update in updates) / samples
        delta = average_deltas(net, state.params, updates, weight_per_step)
        return take_server_step(
            self.server, net, state, delta, updates, weight_per_step, scale=float(scale)
        )
