"""A client of split learning: its part of the network, in this process or on a device.

A method requests mini-batches by round and step, and decides how each one ends. Data and filters
are drawn from that address, so that a step has the same result wherever the client runs.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params, digest
from pliant.rng import rng_stream
from pliant.split.part import ForwardPass, TrainablePart
from pliant.split.payload import Message, encode_labels

if TYPE_CHECKING:  # a session imports its clients
    from pliant.split.session import Session

LabelledBatch = tuple[Tensor, Tensor]
LocalLoss = Callable[[Any, Tensor], Tensor]  # of the part's output and the labels
DRY_MESSAGE = object()  # stands for a dense message


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A request for one mini-batch of a client."""

    round: int
    step: int
    lr: float
    rates: tuple[float, ...] = ()  # at which filters are dropped; empty: none
    needs_activation: bool = True  # whether activations are sent


class SplitClient(Protocol):
    """A client's part; every requested mini-batch ends with `backward` or `skip`."""

    @property
    def params(self) -> Params: ...

    def request_batch(self, request: BatchRequest) -> None:
        """Request a mini-batch without waiting for it."""

    def forward(self) -> object | None:
        """Return the client's message, or None if the client has left."""

    def backward(self, gradient: bytes | None) -> None:
        """End the mini-batch with a step, using the server's gradient if there is one."""

    def skip(self) -> None:
        """End the mini-batch without a step."""

    def load_params(self, params: Mapping[str, Tensor]) -> None:
        """Replace the parameters; keep the optimiser's state."""

    def digest(self) -> str:
        """Return the SHA-256 of the part with its optimiser's state, wherever it is."""

    def state_dict(self) -> Params:
        """Return what the server's checkpoint has of the part."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class LocalClient(TrainablePart):
    """A client in this process, which computes only when a result is needed."""

    def __init__(
        self, number: int, session: "Session", params: Params, local_loss: LocalLoss | None
    ) -> None:
        super().__init__(session.get_sides(number).device_net, params, session.local.optimiser)
        if not session.trains_head:
            self.trained_names = [n for n in self.trained_names if not n.startswith("head.")]
            self.reset_optimiser()
        self.number, self.local_loss = number, local_loss
        self._session, self._payload = session, session.payload
        self._request: BatchRequest | None = None
        self._forward_pass: tuple[ForwardPass, Tensor] | None = None

    def request_batch(self, request: BatchRequest) -> None:
        self._request, self._forward_pass = request, None

    def forward(self) -> object:
        forward_pass, labels = self._run_forward()
        activation: Tensor = forward_pass.output[1]
        body, classes = self._payload.encode(activation), self._session.data.train.classes
        return Message(tuple(activation.shape), body, encode_labels(labels, classes))

    def backward(self, gradient: bytes | None) -> None:
        forward_pass, labels = self._run_forward()
        assert self._request is not None
        loss = None if self.local_loss is None else self.local_loss(forward_pass.output, labels)
        if gradient is not None:
            activation: Tensor = forward_pass.output[1]
            product = (activation * self._payload.decode(gradient, tuple(activation.shape))).sum()
            loss = product if loss is None else loss + product
        if loss is not None:
            leaves = list(forward_pass.leaves.values())
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            self.apply_gradients(forward_pass, grads, self._request.lr)
        self._request = self._forward_pass = None

    def skip(self) -> None:
        self._run_forward()  # updates norm statistics
        self._request = self._forward_pass = None

    def digest(self) -> str:
        return digest(self.state_dict())

    def _run_forward(self) -> tuple[ForwardPass, Tensor]:
        if self._forward_pass is None:
            request = self._request
            if request is None:
                raise ValueError(f"client {self.number}: expected a requested batch, got none")
            x, y = self._session.load_batch(self.number, request.round, request.step)
            subnet = sample_subnet(self.net, request, self._session.seed, self.number)
            self._forward_pass = self.run(subnet, x), y
        return self._forward_pass


class DryClient(LocalClient):  # a subclass, as it keeps all of the part's state
    """A client that computes nothing."""

    def forward(self) -> object:
        return DRY_MESSAGE

    def backward(self, gradient: bytes | None) -> None: ...

    def skip(self) -> None: ...


def sample_subnet(net: Elastic, request: BatchRequest, seed: int, client: int) -> Subnet:
    """Return the subnet of a mini-batch, drawn at its own random address."""
    if not any(request.rates):
        return net.full
    rng = rng_stream(seed, "dropout", request.round, request.step, client)
    return net.draw(request.rates, rng, "bernoulli")
