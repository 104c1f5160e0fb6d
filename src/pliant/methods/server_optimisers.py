"""Server optimisers, which treat the mean delta as a gradient.

Hsu et al., "Measuring the effects of non-identical data distribution for federated visual
classification", 2019 (momentum: FedAvgM). Reddi et al., "Adaptive federated optimization", ICLR
2021 (FedAdam).
"""

from dataclasses import dataclass, field

import torch

from pliant.methods.aggregation import apply_scaled_delta
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import MomentumFactor
from pliant.params import Params
from pliant.value import Positive, Value


@dataclass(frozen=True)
class OptimiserState:
    """The network, and a server optimiser's moments."""

    params: Params
    momentum: Params = field(default_factory=dict)
    square: Params = field(default_factory=dict)


class ServerSgd(Value, frozen=True, tag="sgd"):
    """Step along the mean delta; with momentum this is FedAvgM.

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerSgd(momentum=0.9)).server.momentum  # FedAvgM
    0.9
    """

    lr: Positive = 1.0
    momentum: MomentumFactor = 0.0

    def step(self, net: Elastic, state: OptimiserState, delta: Params) -> OptimiserState:
        """Return the state after one round's delta."""
        momentum: Params = {}
        if self.momentum:
            delta = _update_moment(net, state.momentum, delta, self.momentum, 1.0)
            momentum = _select_trainable(net, delta)
        return OptimiserState(apply_scaled_delta(net, state.params, delta, self.lr), momentum)


class ServerAdam(Value, frozen=True, tag="adam"):
    """Step along the mean delta divided by its typical size, without bias correction: FedAdam.

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerAdam(lr=0.03)).server.lr  # FedAdam
    0.03
    """

    lr: Positive = 0.01
    beta1: MomentumFactor = 0.9
    beta2: MomentumFactor = 0.99
    tau: Positive = 1e-3  # degree of adaptivity; smaller is more adaptive

    def step(self, net: Elastic, state: OptimiserState, delta: Params) -> OptimiserState:
        """Return the state after one round's delta."""
        squares = {name: tensor.square() for name, tensor in delta.items()}
        first = _update_moment(net, state.momentum, delta, self.beta1, 1 - self.beta1)
        second = _update_moment(net, state.square, squares, self.beta2, 1 - self.beta2)
        step = {
            name: tensor / (second[name].sqrt() + self.tau)
            if name in net.trainable_names
            else delta[name]
            for name, tensor in first.items()
        }
        params = apply_scaled_delta(net, state.params, step, self.lr)
        return OptimiserState(params, _select_trainable(net, first), _select_trainable(net, second))


AnyServerOptimiser = ServerSgd | ServerAdam


def _update_moment(net: Elastic, old: Params, new: Params, decay: float, weight: float) -> Params:
    """Return decay × old + weight × new for trained tensors; pass norm statistics through."""
    return {
        name: decay * old.get(name, torch.zeros_like(tensor)) + weight * tensor
        if name in net.trainable_names
        else tensor
        for name, tensor in new.items()
    }


def _select_trainable(net: Elastic, params: Params) -> Params:
    return {name: tensor for name, tensor in params.items() if name in net.trainable_names}
