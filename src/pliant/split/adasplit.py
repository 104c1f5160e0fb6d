"""AdaSplit: clients train on a loss of their own, and only a few use the server at a time.

Chopra et al., "AdaSplit: Adaptive Trade-offs for Resource-constrained Distributed Deep Learning",
2021. With `elastic` it is pliant's own hybrid with Rapp et al., "DISTREAL", AAAI 2022: a client
drops filters before every mini-batch to fit its current speed, and the orchestrator divides a
client's score by the cost of its update.
"""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from pliant.devices import CostRows
from pliant.nn.pareto_table import ParetoTable, resolve_table
from pliant.params import get_params
from pliant.rng import rng_stream
from pliant.split.bandit import Bandit, select_top_clients
from pliant.split.base import SplitEnvironment, SplitStepCost, SplitTraining
from pliant.split.client import BatchRequest, sample_subnet
from pliant.split.losses import nt_xent
from pliant.split.payload import Payload
from pliant.split.server import MaskedServer, PenaltyScope
from pliant.split.session import Session
from pliant.value import Fraction, NonNegative, Positive, Value


class OpenBatch(NamedTuple):
    """A mini-batch that a client has started, and its cost."""

    request: BatchRequest
    cost: SplitStepCost


class AdaSplit(Value, frozen=True, tag="adasplit"):
    """A local phase, then a global one in which selected clients train masked server weights.

    Greek letters are the paper's. docs/split.md explains the fields for choices it leaves open.

    >>> import pliant as pl
    >>> pl.AdaSplit(kappa=0.75, eta=0.4).select
    'ucb'
    """

    cut: str = "stage1"  # the last layer of the client's part (mu)
    local: SplitTraining = SplitTraining()
    payload: Payload = Payload()
    kappa: Fraction = 0.6  # share of rounds in the local phase, without traffic
    eta: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.6  # share of clients selected at a time
    select: Literal["ucb", "random"] = "ucb"
    gamma: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.75  # discount of the orchestrator
    objective: Literal["contrast", "none"] = "contrast"  # none: clients are not trained
    tau: Positive = 0.07
    head: bool = True
    beta: NonNegative = 0.0  # weight of the L1 norm of activations in the local loss
    penalty: NonNegative = 1e-4  # lambda, on the sum of a mask's gates
    penalised: PenaltyScope = "own"
    threshold: Fraction = 0.0  # close gates below it in a second evaluation; 0 is off
    gradient: bool = False  # send the server's gradient back to the client
    relay: bool = False  # pass a client's part on to the next client after every mini-batch
    elastic: bool = False
    table: ParetoTable | None = None  # of the client's part with its head; None: equal rates
    cost_exponent: NonNegative = 1.0  # of costs in client selection; elastic only

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.elastic and not (self.head and self.objective == "contrast"):
            raise ValueError("Expected `head` and an objective for an elastic client, got none")

    @property
    def has_head(self) -> bool:
        return self.head and self.objective == "contrast"

    @property
    def is_client_trained(self) -> bool:
        """Return whether clients train their parts."""
        return self.objective == "contrast" or self.gradient or self.beta > 0

    def begin(self, session: Session) -> None:
        session.make_clients(session.make_client_module, self.payload, self._compute_local_loss)
        session.server = MaskedServer(
            session.server_net,
            get_params(session.split_network.server),
            self.local.optimiser,
            penalty=self.penalty,
            penalised=self.penalised,
            seed=session.seed,
        )

    def train(
        self, session: Session, environment: SplitEnvironment, number: int, rounds: int
    ) -> None:
        local_rounds = int(self.kappa * rounds + 1e-9)
        is_local = number < local_rounds
        lr = self.local.lr_at(max(0, number - local_rounds))
        bandit = Bandit(len(session.data), self.gamma)
        if "bandit" in session.method_state:
            bandit.load_state_dict(session.method_state["bandit"])
        for step in range(session.iterations):
            clients = environment.available_clients()
            position = (number, step)
            selected: list[int] = []
            if not is_local:
                selected = self._select_clients(session, environment, bandit, clients, position)
            start = partial(self._start_batch, session, environment, position, lr, selected)
            # without relay all clients start before the first is waited for
            batches = {} if self.relay else {client: start(client) for client in clients}
            losses = {}
            for client in clients:
                batch = start(client) if self.relay else batches[client]
                loss = None
                if batch is not None:
                    loss = self._finish_batch(session, environment, client, batch)
                if client in selected:  # a rejected message counts as a selection too
                    imputed = float(bandit.last_losses[:, client].mean())
                    losses[client] = imputed if loss is None else loss
                self._relay_part(session, environment, client, clients)
            if not is_local:
                bandit.update(losses)
                environment.barrier()
        session.method_state["bandit"] = bandit.state_dict()

    def _select_clients(
        self,
        session: Session,
        environment: SplitEnvironment,
        bandit: Bandit,
        available: list[int],
        position: tuple[int, int],
    ) -> list[int]:
        count = max(1, round(self.eta * len(session.data)))
        scores = bandit.compute_scores()
        if self.select == "random":
            scores = 0.0 * scores
        if self.elastic and self.cost_exponent and available:
            upload = 4 * self.local.batch * torch.Size(session.activation_shape).numel()
            macs = self.local.batch * session.device_macs
            for client in available:
                scores[client] /= environment.slowdown(client, macs, upload) ** self.cost_exponent
        return select_top_clients(
            scores, available, count, rng_stream(session.seed, "orchestrator", *position)
        )

    def _compute_local_loss(self, output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        embedding, activation = output
        loss = 0.0 * embedding.sum()
        if self.objective == "contrast":
            loss = loss + nt_xent(embedding, labels, self.tau)
        if self.beta:
            loss = loss + self.beta * activation.abs().sum()
        return loss

    def _start_batch(
        self,
        session: Session,
        environment: SplitEnvironment,
        position: tuple[int, int],
        lr: float,
        selected: list[int],
        client: int,
    ) -> OpenBatch | None:
        """Start a client's mini-batch; return None if the client leaves meanwhile."""
        samples = session.batch_size(client, position[1])
        rates = self._select_rates(session, environment, client, samples)
        request = BatchRequest(*position, lr, rates, client in selected)
        subnet = sample_subnet(session.device_net, request, session.seed, client)
        cost = session.device_step_cost(samples, subnet, is_trained=self.is_client_trained)
        forward = SplitStepCost(cost.forward_macs, cost.forward_macs, samples)
        if not environment.compute(client, forward):
            return None
        if not session.is_dry:
            session.clients[client].request_batch(request)
        return OpenBatch(request, cost)

    def _select_rates(
        self, session: Session, environment: SplitEnvironment, client: int, samples: int
    ) -> tuple[float, ...]:
        """Choose the rates at which a client drops filters."""
        if not self.elastic:
            return ()
        table = resolve_table(self.table, session.device_net)
        full = samples * session.device_net.macs(session.device_net.full, training=True)
        share = np.array([environment.affordable_share(client, full)])
        return table.rates[int(CostRows(table.shares).find_rows(share)[0])]

    def _finish_batch(
        self, session: Session, environment: SplitEnvironment, client: int, open_batch: OpenBatch
    ) -> float | None:
        """Finish a client's mini-batch; return the server's loss if the client used the server."""
        request, cost = open_batch
        shape = (cost.samples, *session.activation_shape)
        server_cost = session.server_step_cost(cost.samples, needs_gradient=self.gradient)
        backward = SplitStepCost(cost.macs - cost.forward_macs, 0.0, 0)
        loss = None
        if session.is_dry:
            if request.needs_activation:
                environment.send(client, None, shape, self.payload)
                environment.serve(client, server_cost)
                if self.gradient:
                    entries = torch.Size(shape).numel()
                    size = self.payload.dense_size(entries)
                    environment.send_gradient(client, size, dense=4 * entries, nonzero=4 * entries)
                loss = 1.0
            environment.compute(client, backward)
            return loss
        part, body = session.clients[client], None
        if request.needs_activation:
            message = part.forward()
            if message is None:
                return None
            batch = environment.send(client, message, shape, self.payload)
            if batch is not None:
                environment.serve(client, server_cost)
                loss, gradient = session.active_server.step(
                    client, *batch, request.lr, needs_gradient=self.gradient
                )
                environment.record_loss(client, loss)
                if gradient is not None:
                    body = self.payload.encode(gradient)
                    dense, nonzero = 4 * gradient.numel(), 4 * int(torch.count_nonzero(batch[0]))
                    environment.send_gradient(client, len(body), dense=dense, nonzero=nonzero)
        if self.is_client_trained and environment.compute(client, backward):
            part.backward(body)
        else:
            part.skip()
        return loss

    def _relay_part(
        self, session: Session, environment: SplitEnvironment, client: int, available: list[int]
    ) -> None:
        """Pass a client's part on to the next one, as the authors' code does."""
        if self.relay and len(available) > 1:
            receiver = available[(available.index(client) + 1) % len(available)]
            environment.transfer_part(client, receiver, session.device_bytes)
            session.clients[receiver].load_params(session.clients[client].params)
