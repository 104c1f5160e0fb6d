"""FedNova: changes are normalised by the steps that made them, so that long runs do not bias.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization",
NeurIPS 2020; the momentum-free rule, where a device's change is divided by its number of steps.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from pliant.devices import FULL, Plan
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training
from pliant.methods.merge import mean_change, move_trained
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.value import Value


class FedNova(Value, frozen=True, tag="fednova"):
    """Average changes per step, weighted by data, and go as many steps as devices did on average.

    With p the shares of the data and tau the steps, the change is
    ``(sum p tau) · sum p change / tau``.

    >>> import pliant as pl
    >>> pl.FedNova(local=pl.Local(batch=16)).local.batch
    16
    """

    local: Local = Local()

    def plan(self, net: Elastic) -> Plan:
        return FULL

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        return net.full

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return local_training(net, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        if not updates:
            return state

        def per_step(update: Update) -> Fraction:
            return Fraction(update.owned, update.steps)

        owned = sum(update.owned for update in updates)
        steps = sum(Fraction(update.owned * update.steps, owned) for update in updates)
        length = steps * sum(per_step(update) for update in updates) / owned  # 1 for equal steps
        change = mean_change(net, state.params, updates, per_step)
        return State(move_trained(net, state.params, change, float(length)))
