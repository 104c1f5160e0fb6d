"""Split learning as it began: one client after another, activations up, gradients down.

Gupta and Raskar, "Distributed learning of deep neural network over multiple agents", 2018. The
client's part goes on to the next client after every mini-batch (as the authors of AdaSplit have it
in their baseline) or after every pass over a client's data (Thapa et al., SplitFed, AAAI 2022).
"""

from typing import Literal

import torch

from pliant.params import params_of
from pliant.split.base import Floor, Local
from pliant.split.exchange import exchange, opened
from pliant.split.part import Part
from pliant.split.payload import Payload
from pliant.split.server import Common
from pliant.split.session import Session
from pliant.value import Value


class Split(Value, frozen=True, tag="split"):
    """SL-basic: one network for all, trained by one client at a time.

    With turns of a mini-batch all clients have as many of them as the one with most data, and
    smaller ones begin again; with turns of a pass each has its own.

    >>> import pliant as pl
    >>> pl.Split(cut="stage2", turn="pass").payload == pl.Payload()
    True
    """

    cut: str = "stage1"  # the last layer of the client's part
    local: Local = Local()
    turn: Literal["batch", "pass"] = "batch"
    payload: Payload = Payload()

    @property
    def has_head(self) -> bool:
        return False

    @property
    def threshold(self) -> float:
        return 0.0

    def begin(self, session: Session) -> None:
        session.join(lambda _: session.template, self.payload)
        server = params_of(session.cut.server)
        session.server = Common(Part(session.server_net, server, self.local.optimiser))

    def train(self, session: Session, floor: Floor, number: int, rounds: int) -> None:
        lr = self.local.rate(number)
        before = int(session.notes["turn"]["client"]) if "turn" in session.notes else None
        for client, step in self._turns(session):
            if client not in floor.present():
                continue
            if before is not None and before != client:
                floor.hand_over(before, client, session.device_bytes)
                session.clients[client].take(session.clients[before].params)
            if opened(session, floor, client, (number, step), lr=lr):
                exchange(session, floor, session.served, client, step, lr=lr, payload=self.payload)
            before = client
        if before is not None:
            session.notes["turn"] = {"client": torch.tensor(before)}
            for client, part in session.clients.items():
                if client != before:  # whoever has the part next: all are tested with it
                    part.take(session.clients[before].params)

    def _turns(self, session: Session) -> list[tuple[int, int]]:
        clients = range(len(session.data))
        if self.turn == "batch":
            return [(client, step) for step in range(session.iterations) for client in clients]
        return [(client, step) for client in clients for step in range(session.count(client))]
