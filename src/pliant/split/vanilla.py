"""The original split learning: one client after another, activations up, gradients down.

Gupta and Raskar, "Distributed learning of deep neural network over multiple agents", 2018. The
client's part moves on to the next client after every mini-batch (as in the baseline of AdaSplit's
authors) or after every pass over a client's data (Thapa et al., SplitFed, AAAI 2022).
"""

from typing import Literal

import torch

from pliant.params import get_params
from pliant.split.base import SplitEnvironment, SplitTraining
from pliant.split.exchange import exchange_batch, start_batch
from pliant.split.part import TrainablePart
from pliant.split.payload import Payload
from pliant.split.server import SharedServer
from pliant.split.session import Session
from pliant.value import Value


class VanillaSplit(Value, frozen=True, tag="split"):
    """SL-basic: one network for all clients, trained by one client at a time.

    With `turn="batch"` all clients have as many turns per round as the one with the most data, and
    smaller ones repeat theirs. With `turn="pass"` each trains on its own data once.

    >>> import pliant as pl
    >>> pl.VanillaSplit(cut="stage2", turn="pass").payload == pl.Payload()
    True
    """

    cut: str = "stage1"  # the last layer of the client's part
    local: SplitTraining = SplitTraining()
    turn: Literal["batch", "pass"] = "batch"
    payload: Payload = Payload()

    @property
    def has_head(self) -> bool:
        return False

    @property
    def threshold(self) -> float:
        return 0.0

    def begin(self, session: Session) -> None:
        session.make_clients(lambda _: session.template, self.payload)
        server = get_params(session.split_network.server)
        session.server = SharedServer(
            TrainablePart(session.server_net, server, self.local.optimiser)
        )

    def train(
        self, session: Session, environment: SplitEnvironment, number: int, rounds: int
    ) -> None:
        lr = self.local.lr_at(number)
        server = session.active_server
        state = session.method_state.get("turn")
        previous = None if state is None else int(state["client"])
        for client, step in self._list_turns(session):
            if client not in environment.available_clients():
                continue
            if previous is not None and previous != client:
                environment.transfer_part(previous, client, session.device_bytes)
                session.clients[client].load_params(session.clients[previous].params)
            if start_batch(session, environment, client, (number, step), lr=lr):
                exchange_batch(
                    session, environment, server, client, step, lr=lr, payload=self.payload
                )
            previous = client
        if previous is not None:
            session.method_state["turn"] = {"client": torch.tensor(previous)}
            for client, part in session.clients.items():
                if client != previous:  # all clients are evaluated with the newest part
                    part.load_params(session.clients[previous].params)

    def _list_turns(self, session: Session) -> list[tuple[int, int]]:
        clients = range(len(session.data))
        if self.turn == "batch":
            return [(client, step) for step in range(session.iterations) for client in clients]
        return [(client, step) for client in clients for step in range(session.num_batches(client))]
