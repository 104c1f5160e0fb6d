"""FedPer: devices share the first layers and keep the last ones to themselves.

Arivazhagan et al., "Federated learning with personalization layers", 2019.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import LocalTraining, ServerState, Step, Task, Update, train_locally
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.net_cache import cache_on_net
from pliant.nn.optimisers import Optimiser
from pliant.params import Params
from pliant.value import Value


@dataclass(frozen=True)
class PersonalLayers:
    """The layers that a device keeps to itself; none before its first task."""

    layers: Params = field(default_factory=dict)


class FedPer(Value, frozen=True, tag="fedper"):
    """Average the shared layers by samples; each device trains its own copy of the others.

    `personal` has the names of layers or modules, by default the classifier. The shared network
    keeps the values these had at first, so the score that counts is the personal one. They are
    still sent along, and charged, with the rest of the network.

    >>> import pliant as pl
    >>> pl.FedPer(personal=("fc1", "fc2")).weighting
    'samples'
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    personal: tuple[str, ...] = ()  # (): the last layer
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    @property
    def delta_weighting(self) -> Weighting:
        return self.weighting

    def init_device_state(self, params: Params) -> PersonalLayers:
        check_layers(params, self.personal)
        return PersonalLayers()

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return train_personal(net, task, steps, self.local.optimiser, self.personal)

    def personalise(self, params: Params, device_state: PersonalLayers) -> Params:
        return params | device_state.layers

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting)


def check_layers(params: Params, layers: tuple[str, ...]) -> None:
    """Raise, before a run begins, if the network has no such layer."""
    for layer in layers:
        if not any(name.startswith(f"{layer}.") for name in params):
            known = ", ".join(dict.fromkeys(name.partition(".")[0] for name in params))
            raise ValueError(f"Expected names of layers ({known}), got {layer}")


def train_personal(
    net: Elastic,
    task: Task,
    steps: Iterable[Step],
    optimiser: Optimiser,
    personal: tuple[str, ...],
) -> Update:
    """Train the network with the device's own layers, and keep these out of the delta."""
    own = replace(task, params=task.params | task.device_state.layers)
    update = train_locally(net, own, steps, optimiser)
    names = list_personal(net, personal)
    layers = {name: own.params[name] + update.delta[name] for name in names}
    unchanged = {name: torch.zeros_like(tensor) for name, tensor in layers.items()}
    return replace(update, delta=update.delta | unchanged, device_state=PersonalLayers(layers))


@cache_on_net
def list_personal(net: Elastic, layers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all tensors in these layers, or in the last one."""
    tensors = [*dict(net.module.named_parameters()), *dict(net.module.named_buffers())]
    layers = layers or (net.program.layer_costs[-1].layer.rpartition(".")[0],)
    return tuple(n for n in tensors if any(n.startswith(f"{layer}.") for layer in layers))
