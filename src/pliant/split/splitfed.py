"""SplitFed: clients train in parallel with the server, and their parts are averaged every round.

Thapa et al., "SplitFed: When federated learning meets split learning", AAAI 2022. Version 1 has one
copy of the server's part per client and averages these too. Version 2 has a single one, which all
clients train one mini-batch at a time in random order.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from pliant.rng import rng_stream
from pliant.split.base import SplitTraining
from pliant.split.exchange import SplitRound, average_params
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

    has_head: ClassVar[bool] = False
    threshold: ClassVar[float] = 0.0

    cut: str = "stage1"  # the last layer of the client's part
    local: SplitTraining = SplitTraining()
    version: Literal[1, 2] = 1
    payload: Payload = Payload()
    trim: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.0  # share left out at both ends; 0.5: median

    def set_up(self, session: Session) -> SharedServer:
        session.make_clients(lambda _: session.template)
        return session.make_server()

    def train(self, split_round: SplitRound) -> None:
        session, number = split_round.session, split_round.number
        lr = self.local.lr_at(number)
        params = session.server.effective_params(0)
        clients = range(len(session.data))
        common = session.make_server(params)
        servers = [session.make_server(params) if self.version == 1 else common for _ in clients]
        split_round.reset_optimisers()
        for step in range(session.iterations):
            order = list(clients)
            if self.version == 2:
                rng = rng_stream(session.seed, "order", number, step)
                order = rng.permutation(len(clients)).tolist()
            available = split_round.environment.available_clients()
            batches = [
                split_round.start_batch(client, step, lr)
                for client in order
                if client in available and step < session.num_batches(client)
            ]
            for batch in batches:
                if batch is not None:
                    split_round.finish_batch(batch, servers[batch.client])
        accepted = split_round.average_parts(self.trim)
        if accepted:
            trained = {client: servers[client].params for client in accepted}
            params = trained[accepted[0]]  # the common ones in version 2
            if self.version == 1:
                params = average_params(session, trained, self.trim)
            session.server = session.make_server(params)
