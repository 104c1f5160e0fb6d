"""SplitFed: clients train side by side against the server, and their parts are averaged each round.

Thapa et al., "SplitFed: When federated learning meets split learning", AAAI 2022. Version 1 has a
copy of the server's part for every client, averaged too; version 2 has one that all clients train,
one mini-batch after another in random order.
"""

from typing import Literal

import torch

from pliant.params import Params, is_finite, params_of, shares, weighted_sum
from pliant.rng import stream
from pliant.split.base import Floor, Local
from pliant.split.exchange import exchange, opened
from pliant.split.part import Part
from pliant.split.payload import Payload
from pliant.split.server import Common
from pliant.split.session import Session
from pliant.value import Value


class SplitFed(Value, frozen=True, tag="splitfed"):
    """Split learning in parallel; optimisers start anew each round, as in the authors' code.

    >>> import pliant as pl
    >>> pl.SplitFed(version=2).cut
    'stage1'
    """

    cut: str = "stage1"  # the last layer of the client's part
    local: Local = Local()
    version: Literal[1, 2] = 1
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
        optimiser = self.local.optimiser
        start = session.served.effective(0)
        clients = range(len(session.data))
        common = Common(Part(session.server_net, start, optimiser))
        servers = {
            client: Common(Part(session.server_net, start, optimiser))
            if self.version == 1
            else common
            for client in clients
        }
        for part in session.clients.values():
            part.forget()
        for step in range(session.iterations):
            order = clients
            if self.version == 2:
                drawn = stream(session.seed, "order", number, step).permutation(len(clients))
                order = drawn.tolist()
            here = floor.present()
            working = [
                client
                for client in order
                if client in here
                and step < session.count(client)
                and opened(session, floor, client, (number, step), lr=lr)
            ]
            for client in working:  # all of them are at work by now
                server = servers[client]
                exchange(session, floor, server, client, step, lr=lr, payload=self.payload)
        self._merge(session, floor, servers)

    def _merge(self, session: Session, floor: Floor, servers: dict[int, Common]) -> None:
        """Average what came back by the clients' numbers of samples."""
        back = []
        parts = {client: session.clients[client].params for client in floor.present()}
        for client in [client for client in parts if client in floor.present()]:
            if is_finite(parts[client]):
                back.append(client)
            else:  # (and whoever has gone while it was asked for its part is left out)
                floor.refuse(client, f"client {client}: expected a part of finite numbers")
        if not back:
            return
        floor.collect(back, session.device_bytes)
        owned = [float(len(session.data.devices[client])) for client in back]
        merged = _mean(owned, [parts[client] for client in back])
        for part in session.clients.values():
            part.take(merged)
        copies = [servers[client].part.params for client in back]
        served = copies[0] if self.version == 2 else _mean(owned, copies)
        session.server = Common(Part(session.server_net, served, self.local.optimiser))


def _mean(owned: list[float], parts: list[Params]) -> Params:
    found = weighted_sum(zip(shares(owned), parts, strict=True))
    return {
        name: tensor.to(parts[0][name].dtype)
        if parts[0][name].is_floating_point()
        else torch.round(tensor).to(parts[0][name].dtype)
        for name, tensor in found.items()
    }
