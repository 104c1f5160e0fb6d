"""The building blocks of split methods: training settings, step costs and the environment."""

import math
from typing import NamedTuple, Protocol

from torch import Tensor

from pliant.nn.optimisers import Adam, Optimiser
from pliant.split.payload import Payload
from pliant.value import Count, Natural, Value


class SplitTraining(Value, frozen=True):
    """How both parts are trained: optimiser, batch size and learning-rate schedule.

    The learning rate follows a cosine that reaches zero after `period` rounds with an exchange.
    """

    optimiser: Optimiser = Adam(lr=1e-3, weight_decay=1e-5)
    batch: Count = 32
    period: Natural = 22  # 22 for 20 rounds in the authors' code; 0: constant

    def lr_at(self, rounds_done: int) -> float:
        """Return the learning rate after this many rounds with an exchange."""
        lr = self.optimiser.lr
        if not self.period:
            return lr
        return lr * (1 + math.cos(math.pi * min(rounds_done, self.period) / self.period)) / 2


class SplitStepCost(NamedTuple):
    """What a mini-batch costs one side of the cut."""

    macs: float  # forward and backward
    forward_macs: float  # of these, the forward pass, which is what the authors of AdaSplit count
    samples: int


class SplitEnvironment(Protocol):
    """The devices, links and server of a split run, with their clocks and ledger."""

    def available_clients(self) -> list[int]:
        """Return the clients that are available now."""

    def affordable_share(self, client: int, macs: float) -> float:
        """Return the share of these MACs that a client can do now in the time of one mini-batch."""

    def slowdown(self, client: int, macs: float, upload_bytes: int) -> float:
        """Return how many times longer an update takes now than with full resources."""

    def compute(self, client: int, cost: SplitStepCost) -> bool:
        """Let a client compute; return whether it stayed until the end."""

    def send(
        self, client: int, message: object | None, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        """Upload a message; return its activations and labels, or None if it is rejected.

        Without a message (in a dry run), charge the bytes of a dense one.
        """

    def serve(self, client: int, cost: SplitStepCost) -> None:
        """Let the server compute on a client's message."""

    def send_gradient(self, client: int, size: int, *, dense: int, nonzero: int) -> None:
        """Send a gradient to a client, which waits for it."""

    def transfer_part(self, sender: int, receiver: int, size: int) -> None:
        """Send a client's part to another client, which waits for it."""

    def sync_parts(self, clients: list[int], size: int) -> None:
        """Upload the clients' parts and send them the merged one."""

    def record_refusal(self, client: int, reason: str) -> None:
        """Record why something from a client was rejected."""

    def barrier(self) -> None:
        """Wait until all clients have finished."""

    def record_loss(self, client: int, loss: float) -> None:
        """Record the loss of a mini-batch."""
