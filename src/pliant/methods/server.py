"""Server optimisers: what is done with the mean change, which stands for a gradient.

Hsu et al., "Measuring the effects of non-identical data distribution for federated visual
classification", 2019 (momentum: FedAvgM). Reddi et al., "Adaptive federated optimization", ICLR
2021 (FedAdam).
"""

from dataclasses import replace

import torch

from pliant.methods.base import State
from pliant.methods.merge import move_trained
from pliant.nn.elastic import Elastic
from pliant.nn.optimiser import Memory
from pliant.params import Params
from pliant.value import Positive, Value


class ServerSgd(Value, frozen=True, tag="sgd"):
    """Go along the mean change; with momentum this is FedAvgM.

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerSgd(momentum=0.9)).server.momentum  # FedAvgM
    0.9
    """

    lr: Positive = 1.0
    momentum: Memory = 0.0

    def step(self, net: Elastic, state: State, change: Params) -> State:
        """Return the state after one round's change."""
        memory: dict[str, Params] = {}
        if self.momentum:
            change = _decayed(net, state.extra.get("momentum", {}), change, self.momentum, 1.0)
            memory["momentum"] = _trained(net, change)
        return _moved(net, state, change, self.lr, memory)


class ServerAdam(Value, frozen=True, tag="adam"):
    """Go along the mean change over its typical size, without bias correction: FedAdam.

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerAdam(lr=0.03)).server.lr  # FedAdam
    0.03
    """

    lr: Positive = 0.01
    beta1: Memory = 0.9
    beta2: Memory = 0.99
    tau: Positive = 1e-3  # how much adaptivity, as in the paper

    def step(self, net: Elastic, state: State, change: Params) -> State:
        """Return the state after one round's change."""
        squares = {name: tensor.square() for name, tensor in change.items()}
        first = _decayed(net, state.extra.get("momentum", {}), change, self.beta1, 1 - self.beta1)
        second = _decayed(net, state.extra.get("square", {}), squares, self.beta2, 1 - self.beta2)
        step = {
            name: tensor / (second[name].sqrt() + self.tau) if name in net.trained else change[name]
            for name, tensor in first.items()
        }
        memory = {"momentum": _trained(net, first), "square": _trained(net, second)}
        return _moved(net, state, step, self.lr, memory)


Server = ServerSgd | ServerAdam


def _decayed(net: Elastic, old: Params, new: Params, keep: float, share: float) -> Params:
    """Return keep × old + share × new for what is trained; statistics are only averaged."""
    return {
        name: keep * old.get(name, torch.zeros_like(tensor)) + share * tensor
        if name in net.trained
        else tensor
        for name, tensor in new.items()
    }


def _trained(net: Elastic, params: Params) -> Params:
    return {name: tensor for name, tensor in params.items() if name in net.trained}


def _moved(
    net: Elastic, state: State, change: Params, lr: float, memory: dict[str, Params]
) -> State:
    params = move_trained(net, state.params, change, lr)
    return replace(state, params=params, extra={**state.extra, **memory})
