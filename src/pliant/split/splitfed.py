"""SplitFed: clients train in parallel with the server, and their parts are averaged every round.

Thapa et al., "SplitFed: When federated learning meets split learning", AAAI 2022. Version 1 has one
copy of the server's part per client and averages these too. Version 2 has a single one, which all
clients train one mini-batch at a time in random order.
"""

from typing import Literal

import torch

from pliant.params import Params, get_params, is_finite, normalise_weights, weighted_sum
from pliant.rng import rng_stream
from pliant.split.base import SplitEnvironment, SplitTraining
from pliant.split.exchange import exchange_batch, start_batch
from pliant.split.part import TrainablePart
from pliant.split.payload import Payload
from pliant.split.server import SharedServer
from pliant.split.session import Session
from pliant.value import Value


class SplitFed(Value, frozen=True, tag="splitfed"):
    """Split learning in parallel; optimisers are reset every round, as in the authors' code.

    >>> import pliant as pl
    >>> pl.SplitFed(version=2).cut
    'stage1'
    """

    cut: str = "stage1"  # the last layer of the client's part
    local: SplitTraining = SplitTraining()
    version: Literal[1, 2] = 1
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
        optimiser = self.local.optimiser
        params = session.active_server.effective_params(0)
        clients = range(len(session.data))
        common = SharedServer(TrainablePart(session.server_net, params, optimiser))
        servers = {
            client: SharedServer(TrainablePart(session.server_net, params, optimiser))
            if self.version == 1
            else common
            for client in clients
        }
        for part in session.clients.values():
            part.reset_optimiser()
        for step in range(session.iterations):
            order = list(clients)
            if self.version == 2:
                rng = rng_stream(session.seed, "order", number, step)
                order = rng.permutation(len(clients)).tolist()
            available = environment.available_clients()
            started = [
                client
                for client in order
                if client in available
                and step < session.num_batches(client)
                and start_batch(session, environment, client, (number, step), lr=lr)
            ]
            for client in started:
                server = servers[client]
                exchange_batch(
                    session, environment, server, client, step, lr=lr, payload=self.payload
                )
        self._merge_parts(session, environment, servers)

    def _merge_parts(
        self, session: Session, environment: SplitEnvironment, servers: dict[int, SharedServer]
    ) -> None:
        """Average the parts of the available clients, weighted by their numbers of samples."""
        accepted = []
        parts = {
            client: session.clients[client].params for client in environment.available_clients()
        }
        # a client may leave while its part is fetched
        for client in [client for client in parts if client in environment.available_clients()]:
            if is_finite(parts[client]):
                accepted.append(client)
            else:
                environment.record_refusal(
                    client, f"client {client}: expected a part of finite numbers"
                )
        if not accepted:
            return
        environment.sync_parts(accepted, session.device_bytes)
        sizes = [float(len(session.data.shares[client])) for client in accepted]
        merged = _average_parts(sizes, [parts[client] for client in accepted])
        for part in session.clients.values():
            part.load_params(merged)
        copies = [servers[client].part.params for client in accepted]
        params = copies[0] if self.version == 2 else _average_parts(sizes, copies)
        session.server = SharedServer(
            TrainablePart(session.server_net, params, self.local.optimiser)
        )


def _average_parts(sizes: list[float], parts: list[Params]) -> Params:
    mean = weighted_sum(zip(normalise_weights(sizes), parts, strict=True))
    return {
        name: tensor.to(parts[0][name].dtype)
        if parts[0][name].is_floating_point()
        else torch.round(tensor).to(parts[0][name].dtype)
        for name, tensor in mean.items()
    }
