"""What every split method is made of: how parts train, what it asks of an engine."""

import math
from typing import NamedTuple, Protocol

from torch import Tensor

from pliant.nn.optimiser import Adam, Optimiser
from pliant.split.payload import Payload
from pliant.value import Count, Natural, Value


class Local(Value, frozen=True):
    """How both parts are trained: optimiser, batch size, and how the learning rate falls.

    The rate follows a cosine that would come to zero after `period` rounds with an exchange.
    """

    optimiser: Optimiser = Adam(lr=1e-3, weight_decay=1e-5)
    batch: Count = 32
    period: Natural = 22  # 22 for 20 rounds in the authors' code; 0 is constant

    def rate(self, done: int) -> float:
        """Return the learning rate after so many rounds with an exchange."""
        lr = self.optimiser.lr
        if not self.period:
            return lr
        return lr * (1 + math.cos(math.pi * min(done, self.period) / self.period)) / 2


class Work(NamedTuple):
    """What a mini-batch costs a side."""

    macs: float  # forward and backward
    forward: float  # of these, the forward pass: what the authors of AdaSplit count
    samples: int


class Floor(Protocol):
    """Where split training takes place: devices, links and the server, with clocks and a ledger."""

    def present(self) -> list[int]:
        """Return the clients that are here now."""

    def share(self, client: int, macs: float) -> float:
        """Return how much of so many MACs a client can do now in a mini-batch's slot."""

    def strain(self, client: int, macs: float, sent: int) -> float:
        """Return how many times longer an update takes a client now than with full resources."""

    def compute(self, client: int, work: Work) -> bool:
        """Let a client compute; tell whether it stayed to the end."""

    def send(
        self, client: int, message: object | None, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        """Send a message up; return what the server accepts of it, None if it is refused.

        Without a message (in a dry run) the bytes of a dense one are charged.
        """

    def serve(self, client: int, work: Work) -> None:
        """Let the server work on what a client has sent."""

    def give_back(self, client: int, size: int, *, dense: int, nonzero: int) -> None:
        """Send a gradient down to a client, who waits for it."""

    def hand_over(self, giver: int, taker: int, size: int) -> None:
        """Send a client's part to the next one, who waits for it."""

    def collect(self, clients: list[int], size: int) -> None:
        """Send clients' parts up to the server and the merged one down to them."""

    def refuse(self, client: int, why: str) -> None:
        """Write down why something of a client was not taken."""

    def gather(self) -> None:
        """Let everybody wait until all are through."""

    def note(self, client: int, loss: float) -> None:
        """Write down the loss of a mini-batch."""
