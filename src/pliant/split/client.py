"""A client of split learning: its part of the network, and where that is trained.

A method asks for mini-batches by their addresses and says how each one ends. Whoever has the part
draws data and filters by these addresses: so the same step comes out in this process and elsewhere.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.rng import stream
from pliant.split.part import Part, Pass
from pliant.split.payload import Message, Payload, write_labels

Batch = tuple[Tensor, Tensor]
Own = Callable[[Any, Tensor], Tensor]  # a client's own loss, of what its part gives and labels


class Turn(Struct, frozen=True, forbid_unknown_fields=True):
    """One mini-batch of a client, as it is asked for."""

    round: int
    step: int
    lr: float
    rates: tuple[float, ...] = ()  # of filters that are left out; none: the whole part
    talks: bool = True  # activations are sent


class Client(Protocol):
    """A client's part; each mini-batch that is asked for ends with a step or without."""

    @property
    def params(self) -> Params:
        """Return the part's parameters."""

    def ask(self, turn: Turn) -> None:
        """Ask for a mini-batch; nobody waits for it."""

    def message(self) -> object | None:
        """Return what the client sends of it, or None if the client has gone."""

    def learn(self, slope: bytes | None) -> None:
        """End it with a step, along the server's gradient where there is one."""

    def drop(self) -> None:
        """End it without a step."""

    def take(self, params: Mapping[str, Tensor]) -> None:
        """Take over another part's parameters; the optimiser's memory stays."""

    def forget(self) -> None:
        """Let the optimiser start anew."""

    def state(self) -> Params:
        """Return everything as named tensors."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""


class Here:
    """A client whose part is in this process; it computes when the result is asked for."""

    def __init__(
        self,
        number: int,
        part: Part,
        batch: Callable[[int, int, int], Batch],  # of a client, a round and a step
        *,
        seed: int,
        payload: Payload,
        classes: int,
        own: Own | None,
    ) -> None:
        self.number, self.part = number, part
        self._batch, self._seed = batch, seed
        self._payload, self._classes, self._own = payload, classes, own
        self._turn: Turn | None = None
        self._done: tuple[Pass, Tensor] | None = None

    @property
    def params(self) -> Params:
        return self.part.params

    def ask(self, turn: Turn) -> None:
        self._turn, self._done = turn, None

    def message(self) -> Message:
        done, labels = self._forward()
        activation: Tensor = done.output[1]
        body = self._payload.encode(activation)
        return Message(tuple(activation.shape), body, write_labels(labels, self._classes))

    def learn(self, slope: bytes | None) -> None:
        done, labels = self._forward()
        assert self._turn is not None
        felt = None if self._own is None else self._own(done.output, labels)
        if slope is not None:
            activation: Tensor = done.output[1]
            along = (activation * self._payload.decode(slope, tuple(activation.shape))).sum()
            felt = along if felt is None else felt + along
        if felt is not None:
            grads = torch.autograd.grad(felt, list(done.leaves.values()), allow_unused=True)
            self.part.descend(done, grads, self._turn.lr)
        self._turn = self._done = None

    def drop(self) -> None:
        self._forward()  # what norm layers gather on the way stays
        self._turn = self._done = None

    def take(self, params: Mapping[str, Tensor]) -> None:
        self.part.take(params)

    def forget(self) -> None:
        self.part.forget()

    def state(self) -> Params:
        return self.part.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.part.restore(state)

    def _forward(self) -> tuple[Pass, Tensor]:
        if self._done is None:
            turn = self._turn
            if turn is None:
                raise ValueError(f"client {self.number}: expected to be asked for a mini-batch")
            x, y = self._batch(self.number, turn.round, turn.step)
            self._done = self.part.run(drawn(self.part.net, turn, self._seed, self.number), x), y
        return self._done


def drawn(net: Elastic, turn: Turn, seed: int, number: int) -> Subnet:
    """Return the filters of a mini-batch: all, or a draw at the mini-batch's own address."""
    if not any(turn.rates):
        return net.full
    return net.draw(turn.rates, stream(seed, "dropout", turn.round, turn.step, number))
