"""Server optimisers, which treat the merged delta of any method as a gradient.

Hsu et al., "Measuring the effects of non-identical data distribution for federated visual
classification", 2019 (momentum: FedAvgM). Reddi et al., "Adaptive federated optimization", ICLR
2021 (FedAdam, FedYogi, FedAdagrad). Jhunjhunwala et al., "FedExP: Speeding up federated averaging
via extrapolation", ICLR 2023. Douillard et al., "DiLoCo: Distributed low-communication training of
language models", 2023 (Nesterov momentum for merged deltas).
"""

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from pliant.methods.aggregation import (
    CoverFn,
    Updates,
    UpdateStream,
    WeightFn,
    Weighting,
    apply_scaled_delta,
    open_stream,
    scale_weights,
    weight_by,
)
from pliant.methods.base import Update
from pliant.methods.robust import AnyMerge, Mean, merge_by_rule
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import MomentumFactor
from pliant.params import Params
from pliant.value import NonNegative, Positive, Value


class HasMoments(Protocol):
    """A server state with the moments of an optimiser, such as `ServerState`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def params(self) -> Params: ...
    @property
    def momentum(self) -> Params: ...
    @property
    def square(self) -> Params: ...


S = TypeVar("S", bound=HasMoments)


@dataclass(frozen=True)
class ServerStep:
    """A step of the server, and the moments after it."""

    delta: Params
    lr: float
    momentum: Params = field(default_factory=dict)
    square: Params = field(default_factory=dict)


class ServerSgd(Value, frozen=True, tag="sgd"):
    """Step along the merged delta; with momentum this is FedAvgM.

    With `nesterov`, the newest delta counts once more than in the momentum, as in PyTorch's SGD.

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerSgd(momentum=0.9)).server.momentum  # FedAvgM
    0.9
    """

    lr: Positive = 1.0
    momentum: MomentumFactor = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise ValueError(
                "Expected a momentum above 0 with nesterov, got 0 - at `$.momentum` of ServerSgd"
            )

    def compute_step(
        self, net: Elastic, state: HasMoments, delta: Params, mean_square: Callable[[], float]
    ) -> ServerStep:
        """Return the step for a round's merged delta."""
        if not self.momentum:
            return ServerStep(delta, self.lr)
        moment = _update_moment(net, state.momentum, delta, self.momentum, 1.0)
        kept = _select_trainable(net, moment)
        step = _update_moment(net, kept, delta, self.momentum, 1.0) if self.nesterov else moment
        return ServerStep(step, self.lr, kept)


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

    def compute_step(
        self, net: Elastic, state: HasMoments, delta: Params, mean_square: Callable[[], float]
    ) -> ServerStep:
        def update_square(old: Tensor, new: Tensor) -> Tensor:
            return self.beta2 * old + (1 - self.beta2) * new

        return _adapt_step(self, net, state, delta, update_square)


class ServerYogi(Value, frozen=True, tag="yogi"):
    """Like `ServerAdam`, but let the typical size fall slowly: FedYogi.

    >>> import pliant as pl
    >>> pl.HeteroFl(server=pl.ServerYogi(lr=0.03)).server.beta2
    0.99
    """

    lr: Positive = 0.01
    beta1: MomentumFactor = 0.9
    beta2: MomentumFactor = 0.99
    tau: Positive = 1e-3

    def compute_step(
        self, net: Elastic, state: HasMoments, delta: Params, mean_square: Callable[[], float]
    ) -> ServerStep:
        def update_square(old: Tensor, new: Tensor) -> Tensor:
            return old - (1 - self.beta2) * new * torch.sign(old - new)

        return _adapt_step(self, net, state, delta, update_square)


class ServerAdagrad(Value, frozen=True, tag="adagrad"):
    """Step along the mean delta divided by the size of all deltas so far: FedAdagrad.

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerAdagrad(lr=0.1)).server.beta1
    0.0
    """

    lr: Positive = 0.01
    beta1: MomentumFactor = 0.0
    tau: Positive = 1e-3

    def compute_step(
        self, net: Elastic, state: HasMoments, delta: Params, mean_square: Callable[[], float]
    ) -> ServerStep:
        return _adapt_step(self, net, state, delta, torch.add)


class ServerExtrapolation(Value, frozen=True, tag="fedexp"):
    """Step further along the merged delta, the more the devices' deltas disagree: FedExP.

    The step is half the mean squared norm of the deltas over the squared norm of their mean, and
    at least 1.

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerExtrapolation()).server.eps
    0.001
    """

    eps: NonNegative = 1e-3

    def compute_step(
        self, net: Elastic, state: HasMoments, delta: Params, mean_square: Callable[[], float]
    ) -> ServerStep:
        merged = _sum_squares(net, delta) + self.eps
        return ServerStep(delta, max(1.0, mean_square() / (2 * merged)) if merged else 1.0)


AnyServerOptimiser = ServerSgd | ServerAdam | ServerYogi | ServerAdagrad | ServerExtrapolation


def merge_average(
    server: AnyServerOptimiser,
    net: Elastic,
    state: S,
    updates: Updates,
    weighting: Weighting,
    cover: CoverFn | None = None,
    rule: AnyMerge | None = None,
) -> S:
    """Merge updates, by their weighted mean unless told otherwise, and take the server's step."""
    weight, stream = weight_by(weighting), open_stream(updates)
    squares = measure_squares(server, net, stream)
    delta = merge_by_rule(rule or Mean(), net, state.params, stream, weight, cover)
    return take_server_step(server, net, state, delta, stream.seen, weight, squares)


def measure_squares(
    server: AnyServerOptimiser, net: Elastic, stream: UpdateStream
) -> Sequence[float]:
    """Return the squared norms of the deltas, which are filled in as the stream is read.

    There are none if the server does not need them.
    """
    squares: list[float] = []
    if isinstance(server, ServerExtrapolation):
        stream.observe(lambda update: squares.append(_sum_squares(net, update.delta)))
    return squares


def take_server_step(
    server: AnyServerOptimiser,
    net: Elastic,
    state: S,
    delta: Params,
    updates: Sequence[Update],
    weight: WeightFn,
    squares: Sequence[float],
    *,
    scale: float = 1.0,
) -> S:
    """Return the state after one step along `scale` times the merged delta.

    `updates` need no tensors; `squares` are the squared norms of their deltas.

    A round without updates changes nothing, not even the momentum. Entries that no device trained
    have a delta of 0, but may move by their momentum. Norm statistics take the delta as it is.
    """
    if not updates:
        return state

    def compute_mean_square() -> float:
        shares = scale_weights([weight(update) for update in updates])
        total = sum(share * square for share, square in zip(shares, squares, strict=True))
        return scale**2 * total / sum(shares)

    if scale != 1.0:
        delta = {n: t * scale if n in net.trainable_names else t for n, t in delta.items()}
    step = server.compute_step(net, state, delta, compute_mean_square)
    params = apply_scaled_delta(net, state.params, step.delta, step.lr)
    return replace(state, params=params, momentum=step.momentum, square=step.square)


def _adapt_step(
    server: ServerAdam | ServerYogi | ServerAdagrad,
    net: Elastic,
    state: HasMoments,
    delta: Params,
    update_square: Callable[[Tensor, Tensor], Tensor],
) -> ServerStep:
    """Return the step along the mean delta, divided by the root of its second moment.

    That moment starts at tau², as in the paper.
    """
    first = _update_moment(net, state.momentum, delta, server.beta1, 1 - server.beta1)
    second = {
        name: update_square(
            state.square.get(name, torch.full_like(tensor, server.tau**2)), tensor.square()
        )
        for name, tensor in _select_trainable(net, delta).items()
    }
    step = {
        name: tensor / (second[name].sqrt() + server.tau) if name in second else tensor
        for name, tensor in first.items()
    }
    return ServerStep(step, server.lr, _select_trainable(net, first), second)


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


def _sum_squares(net: Elastic, delta: Params) -> float:
    """Return the squared norm of what is trained."""
    tensors = _select_trainable(net, delta).values()
    return sum(float(tensor.to(torch.float64).square().sum()) for tensor in tensors)
