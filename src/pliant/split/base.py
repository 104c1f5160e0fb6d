"""The building blocks of split methods: training settings, costs and the environment."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pliant.data import CropFlip
from pliant.nn.optimisers import Adam, Optimiser
from pliant.value import Count, Natural, Value


class SplitTraining(Value, frozen=True):
    """How both parts are trained: optimiser, batch size, learning-rate schedule, augmentation.

    The learning rate follows a cosine that reaches zero after `period` rounds.
    """

    optimiser: Optimiser = Adam(lr=1e-3, weight_decay=1e-5)
    batch: Count = 32
    period: Natural = 22  # 22 for 20 rounds in AdaSplit's code; 0: constant
    decay: Literal["rounds", "exchanges"] = "rounds"  # exchanges: constant in a local phase
    augment: CropFlip | None = None  # of the training images

    def lr_at(self, round: int, local_rounds: int = 0) -> float:
        """Return the learning rate of a round in a run that starts with some local rounds."""
        lr, rounds_done = self.optimiser.lr, round
        if not self.period:
            return lr
        if self.decay == "exchanges":
            rounds_done = max(0, round - local_rounds)
        return lr * (1 + math.cos(math.pi * min(rounds_done, self.period) / self.period)) / 2


@dataclass
class ClientCosts:
    """The running costs of one client in a round."""

    macs: float = 0.0
    samples: int = 0
    steps: int = 0
    up: int = 0
    down: int = 0
    busy: float = 0.0
    waited: float = 0.0
    idle: float = 0.0  # seconds without any work or transfer
    forward: float = 0.0  # MACs of the forward passes, which is what AdaSplit's authors count
    server: float = 0.0  # likewise, of the server for this client
    uplinks: int = 0
    dense: int = 0
    nonzero: int = 0
    relayed: int = 0
    requests: int = 0  # to a device, each with its reply
    tensors: int = 0  # in these
    shown: int = 0  # bytes of parts that are sent only to be tested or kept
    losses: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    has_left: bool = False
    has_bad_part: bool = False

    @property
    def is_rejected(self) -> bool:
        """Return whether the client's part or all its messages were rejected."""
        refused = self.refused.total()
        return self.has_bad_part or (refused > 0 and refused >= self.uplinks)

    def add_pass(self, macs: float, samples: int) -> None:
        """Add a forward pass on some samples, or a backward pass on none."""
        self.macs += macs
        if samples:
            self.forward += macs
            self.samples += samples
            self.steps += 1


class SplitEnvironment(Protocol):
    """What a method may ask about the devices of a round."""

    def available_clients(self) -> list[int]:
        """Return the clients that are available now."""

    def affordable_share(self, client: int) -> float:
        """Return the share of a mini-batch that a client can do now in the time of a full one."""

    def slowdown(self, client: int, macs: float, upload_bytes: int) -> float:
        """Return how many times longer an update takes now than with full resources."""

    def barrier(self) -> None:
        """Wait until all clients have finished."""


class ChargedEnvironment(SplitEnvironment, Protocol):
    """The clocks of devices, links and server; `SplitRound` charges them with all that it does.

    It keeps the clients' MACs and seconds; `SplitRound` counts all else.
    """

    @property
    def costs(self) -> Sequence[ClientCosts]: ...

    def compute(self, client: int, macs: float, samples: int) -> bool:
        """Let a client compute; return whether it stayed until the end.

        A forward pass has samples, a backward pass has none.
        """

    def upload(self, client: int, size: int) -> None: ...

    def serve(self, clients: Sequence[int], macs: float) -> None:
        """Let the server compute on the messages of these clients once it has them all."""

    def download(self, client: int, size: int) -> None:
        """Send a reply to a client's message; the client waits for it."""

    def transfer(
        self, senders: Sequence[int], receivers: Sequence[int], sizes: Mapping[int, int]
    ) -> None:
        """Send parts by way of the server; every receiver waits for the last sender."""
