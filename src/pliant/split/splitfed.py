"""SplitFed: clients train in parallel with the server, and their parts are averaged every round.

Thapa et al., "SplitFed: When federated learning meets split learning", AAAI 2022. Version 1 has one
copy of the server's part per client and averages these too. Version 2 has a single one, which all
clients train one mini-batch at a time in random order. In version 1 the cut can slide with the
speed of a device, as in S2FL, arXiv 2311.13163.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import nn

from pliant.rng import rng_stream
from pliant.split.base import SplitTraining
from pliant.split.exchange import SplitRound
from pliant.split.payload import Payload
from pliant.split.server import ServerCopies, ServerPart
from pliant.split.session import Session
from pliant.value import Value


class SplitFed(Value, frozen=True, tag="splitfed"):
    """Split learning in parallel; smaller clients repeat their data until the largest is done.

    Optimisers keep their state between rounds, as in all split methods here.

    >>> import pliant as pl
    >>> pl.SplitFed(version=2).cut
    'stage1'
    """

    threshold: ClassVar[float] = 0.0
    shares_parts: ClassVar[bool] = True

    cut: str = "stage1"  # the last layer of the client's part
    slide: tuple[str, ...] = ()  # further cuts: each round, a client takes its fastest
    local: SplitTraining = SplitTraining()
    version: Literal[1, 2] = 1
    payload: Payload = Payload()
    trim: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.0  # share left out at both ends; 0.5: median
    joined: bool = False  # version 2 trains once on all clients' mini-batches together

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.joined and self.version == 1:
            raise ValueError("Expected version = 2 with `joined`, got one server copy per client")
        if self.slide and self.version == 2:
            raise ValueError(
                "Expected version = 1 with `slide`, got 2: clients with different cuts cannot "
                "train one server's part"
            )

    def make_head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Identity()

    def set_up(self, session: Session) -> ServerPart:
        session.make_clients(lambda _: session.template)
        server = session.make_server()
        if self.version == 2:
            return server
        return ServerCopies(server, get_net=lambda client: session.get_sides(client).server_net)

    def train(self, split_round: SplitRound) -> None:
        session, number = split_round.session, split_round.number
        lr = self.local.lr_at(number)
        for step in range(session.iterations):
            order = list(range(len(session.data)))
            if self.version == 2:
                rng = rng_stream(session.seed, "order", number, step)
                order = rng.permutation(len(order)).tolist()
            available = split_round.environment.available_clients()
            batches = [
                split_round.start_batch(client, step, lr) for client in order if client in available
            ]
            split_round.finish_batches(batches, joined=self.joined)
        if self.slide:
            split_round.average_networks(trim=self.trim)
        else:
            split_round.average_copies(split_round.average_parts(trim=self.trim), self.trim)
