"""The original split learning: one client after another, activations up, gradients down.

Gupta and Raskar, "Distributed learning of deep neural network over multiple agents", 2018. The
client's part moves on to the next client after every mini-batch (as in the baseline of AdaSplit's
authors) or after a client's whole round (Thapa et al., SplitFed, AAAI 2022).
"""

from typing import ClassVar, Literal

import torch
from torch import nn

from pliant.split.base import SplitTraining
from pliant.split.exchange import SplitRound
from pliant.split.payload import Payload
from pliant.split.server import SharedServer
from pliant.split.session import Session
from pliant.value import Value


class VanillaSplit(Value, frozen=True, tag="split"):
    """SL-basic: one network for all clients, trained by one client at a time.

    All clients train as many mini-batches per round as the one with the most data; smaller ones
    repeat theirs. The client's part moves on after every mini-batch or, with `turn="pass"`, after
    all of a client's mini-batches.

    >>> import pliant as pl
    >>> pl.VanillaSplit(cut="stage2", turn="pass").payload == pl.Payload()
    True
    """

    slide: ClassVar[tuple[str, ...]] = ()
    threshold: ClassVar[float] = 0.0
    shares_parts: ClassVar[bool] = True

    cut: str = "stage1"  # the last layer of the client's part
    local: SplitTraining = SplitTraining()
    turn: Literal["batch", "pass"] = "batch"
    payload: Payload = Payload()
    joined: bool = False  # all clients at once: one server step, then the mean of their parts

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.joined and self.turn == "pass":
            raise ValueError('Expected turn = "batch" with `joined`, got "pass"')

    def make_head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Identity()

    def set_up(self, session: Session) -> SharedServer:
        session.make_clients(lambda _: session.template)
        return session.make_server()

    def train(self, split_round: SplitRound) -> None:
        session = split_round.session
        lr = self.local.lr_at(split_round.number)
        if self.joined:
            self._train_joined(split_round, lr)
            return
        state = session.method_state.get("turn")
        previous = None if state is None else int(state["client"])
        for client, step in self._list_turns(session):
            if client not in split_round.environment.available_clients():
                continue
            if previous is not None and previous != client:
                split_round.transfer_part(previous, client)
            batch = split_round.start_batch(client, step, lr)
            if batch is not None:
                split_round.finish_batch(batch, session.server)
            previous = client
        if previous is not None:
            session.method_state["turn"] = {"client": torch.tensor(previous)}
            split_round.show_part(previous)

    def _train_joined(self, split_round: SplitRound, lr: float) -> None:
        for step in range(split_round.session.iterations):
            clients = split_round.environment.available_clients()
            batches = [split_round.start_batch(client, step, lr) for client in clients]
            split_round.finish_batches(batches, joined=True)
            split_round.average_parts()

    def _list_turns(self, session: Session) -> list[tuple[int, int]]:
        clients, steps = range(len(session.data)), range(session.iterations)
        if self.turn == "batch":
            return [(client, step) for step in steps for client in clients]
        return [(client, step) for client in clients for step in steps]
