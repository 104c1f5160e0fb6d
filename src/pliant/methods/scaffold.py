"""SCAFFOLD: control variates correct the drift of local steps towards each device's own data.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020;
variates by option II.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from pliant.methods.aggregation import Updates, Weighting, open_stream
from pliant.methods.base import LocalTraining, Step, Task, Update, train_corrected
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Sgd
from pliant.params import Params, nbytes, subtract
from pliant.value import Count, Value


@dataclass(frozen=True)
class ScaffoldState:
    """The network and the server's control variate, with what it is computed from."""

    params: Params
    control: Params = field(default_factory=dict)
    total: Params = field(default_factory=dict)  # of the devices' variates, in float64
    devices: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # seen
    momentum: Params = field(default_factory=dict)  # of a server optimiser
    square: Params = field(default_factory=dict)  # likewise


@dataclass(frozen=True)
class ScaffoldDeviceState:
    """A device's control variate."""

    control: Params = field(default_factory=dict)


class Scaffold(Value, frozen=True, tag="scaffold"):
    """Step along ``gradient - device variate + server variate``; devices keep their variates.

    `devices` is the paper's N, the number of variates that the server's averages; by default it is
    the size of the fleet, or without one the number of devices seen so far.

    >>> import pliant as pl
    >>> pl.Scaffold(devices=100).weighting
    'samples'
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    devices: Count | None = None
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        optimiser = self.local.optimiser
        if not isinstance(optimiser, Sgd) or optimiser.momentum:
            raise ValueError("Expected SGD without momentum, as variates average its gradients")

    def fit_fleet(self, size: int) -> "Scaffold":
        return self if self.devices else msgspec.structs.replace(self, devices=size)

    def extra_upload_bytes(self, net: Elastic) -> int:
        return nbytes({n: p for n, p in net.module.named_parameters() if n in net.trainable_names})

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        local = _fill_variates(net, task, task.device_state.control)
        common = _fill_variates(net, task, task.extra)
        optimiser, shift = self.local.optimiser, subtract(common, local)
        update = train_corrected(net, task, steps, optimiser, shift, _add_shift)
        scale = 1.0 / (max(1, update.steps) * task.lr)
        new = {name: local[name] - common[name] - scale * update.delta[name] for name in local}
        return replace(update, extra=subtract(new, local), device_state=ScaffoldDeviceState(new))

    def init_state(self, params: Params) -> ScaffoldState:
        return ScaffoldState(params)

    def init_device_state(self, params: Params) -> ScaffoldDeviceState:
        return ScaffoldDeviceState()

    def broadcast(self, state: ScaffoldState) -> Params:
        return state.control

    def merge(self, net: Elastic, state: ScaffoldState, updates: Updates) -> ScaffoldState:
        stream, total = open_stream(updates), dict(state.total)

        def add_shift(update: Update) -> None:
            for name, shift in update.extra.items():
                total[name] = total.get(name, torch.zeros_like(shift, dtype=torch.float64)) + shift

        stream.observe(add_shift)
        merged = merge_average(self.server, net, state, stream, self.weighting)
        if not stream.seen:
            return state
        devices = {*state.devices.tolist(), *(update.device for update in stream.seen)}
        count = self.devices or len(devices)
        control = {
            name: (sums / count).to(merged.params[name].dtype) for name, sums in total.items()
        }
        return replace(merged, control=control, total=total, devices=torch.tensor(sorted(devices)))


def _add_shift(grads: list[Tensor], params: list[Tensor], shift: list[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_add(grads, shift)


def _fill_variates(net: Elastic, task: Task, stored: Params) -> Params:
    """Return the stored variates, with zeros for those not yet known."""
    trained = (name for name in task.params if name in net.trainable_names)
    return {n: stored[n] if n in stored else torch.zeros_like(task.params[n]) for n in trained}
