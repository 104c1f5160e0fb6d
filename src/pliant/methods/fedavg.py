"""FedAvg: the full network everywhere, a mean weighted by samples.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
AISTATS 2017.
"""

from collections.abc import Iterable, Sequence

from pliant.devices import FULL, Plan
from pliant.methods.base import Local, Place, State, Step, Task, Update, local_training
from pliant.methods.merge import Weigh, weight_by
from pliant.methods.robust import AnyMerge, Mean, merged_change
from pliant.methods.server import Server, ServerSgd
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.value import Value


class FedAvg(Value, frozen=True, tag="fedavg"):
    """Train the full network on every device and average by samples.

    With a server optimiser it is FedAvgM (`ServerSgd(momentum=0.9)`) or FedAdam (`ServerAdam()`).

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerSgd(momentum=0.9)).weigh
    'samples'
    """

    local: Local = Local()
    weigh: Weigh = "samples"
    merging: AnyMerge = Mean()  # or one that lying devices cannot ruin
    server: Server = ServerSgd()

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
        change = merged_change(self.merging, net, state.params, updates, weight_by(self.weigh))
        return self.server.step(net, state, change)
