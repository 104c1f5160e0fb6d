"""AdaSplit: clients learn by themselves, and few of them talk to the server at a time.

Chopra et al., "AdaSplit: Adaptive Trade-offs for Resource-constrained Distributed Deep Learning",
2021. With `elastic` it is pliant's own hybrid with Rapp et al., "DISTREAL", AAAI 2022: a client
drops filters of its part before every mini-batch, as many as its speed asks for, and the
orchestrator weighs what a client can teach by what its update costs.
"""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from pliant.devices import Rows
from pliant.explore.table import Table, fitting
from pliant.params import params_of
from pliant.rng import stream
from pliant.split.bandit import Bandit, best
from pliant.split.base import Floor, Local, Work
from pliant.split.client import Turn, drawn
from pliant.split.contrast import nt_xent
from pliant.split.payload import Payload
from pliant.split.server import Masked, Penalised
from pliant.split.session import Session
from pliant.value import Fraction, NonNegative, Positive, Value


class Begun(NamedTuple):
    """A mini-batch that a client has begun, and what it costs."""

    turn: Turn
    work: Work


class AdaSplit(Value, frozen=True, tag="adasplit"):
    """A local phase, then a global one in which the best clients train masked server weights.

    Greek letters are the paper's. What its sources leave open is a field: see docs/split.md.

    >>> import pliant as pl
    >>> pl.AdaSplit(kappa=0.75, eta=0.4).select
    'ucb'
    """

    cut: str = "stage1"  # the last layer of the client's part (mu)
    local: Local = Local()
    payload: Payload = Payload()
    kappa: Fraction = 0.6  # share of the rounds without any traffic
    eta: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.6  # share of the clients that talk at a time
    select: Literal["ucb", "random"] = "ucb"
    gamma: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.75  # discount of the orchestrator
    objective: Literal["contrast", "none"] = "contrast"  # none: clients stay as they were drawn
    tau: Positive = 0.07
    head: bool = True
    beta: NonNegative = 0.0  # on the sum of activations
    penalty: NonNegative = 1e-4  # lambda, on the sum of a mask's gates
    penalised: Penalised = "own"
    threshold: Fraction = 0.0  # gates below it are shut in a second test; 0 is off
    gradient: bool = False  # the server's goes back to the client
    relay: bool = False  # a client's part goes on to the next client after every mini-batch
    elastic: bool = False
    table: Table | None = None  # of the client's part and its head; None: equal rates
    thrift: NonNegative = 1.0  # how much costs weigh in the choice of clients; elastic only

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.elastic and not (self.head and self.objective == "contrast"):
            raise ValueError("Expected a head and an objective of its own for an elastic client")

    @property
    def has_head(self) -> bool:
        return self.head and self.objective == "contrast"

    @property
    def trains(self) -> bool:
        """Tell whether a client's part is trained at all."""
        return self.objective == "contrast" or self.gradient or self.beta > 0

    def begin(self, session: Session) -> None:
        session.join(session.redrawn, self.payload, self._own)
        session.server = Masked(
            session.server_net,
            params_of(session.cut.server),
            self.local.optimiser,
            penalty=self.penalty,
            penalised=self.penalised,
            seed=session.seed,
        )

    def train(self, session: Session, floor: Floor, number: int, rounds: int) -> None:
        alone = int(self.kappa * rounds + 1e-9)
        lr = self.local.rate(max(0, number - alone))
        bandit = Bandit(len(session.data), self.gamma)
        if "bandit" in session.notes:
            bandit.restore(session.notes["bandit"])
        for step in range(session.iterations):
            here = floor.present()
            is_alone = number < alone
            chosen: list[int] = []
            if not is_alone:
                chosen = self._chosen(session, floor, bandit, here, (number, step))
            begin = partial(self._begun, session, floor, (number, step), lr, chosen)
            begun = {} if self.relay else {client: begin(client) for client in here}
            losses = {}
            for client in here:  # without relay all are at work before the first is waited for
                turn = begin(client) if self.relay else begun[client]
                loss = None if turn is None else self._ended(session, floor, client, turn)
                if client in chosen:  # one that is refused has had its turn too
                    imputed = float(bandit.last[:, client].mean())
                    losses[client] = imputed if loss is None else loss
                self._relayed(session, floor, client, here)
            if not is_alone:
                bandit.learn(losses)
                floor.gather()
        session.notes["bandit"] = bandit.state()

    def _chosen(
        self,
        session: Session,
        floor: Floor,
        bandit: Bandit,
        here: list[int],
        place: tuple[int, int],
    ) -> list[int]:
        count = max(1, round(self.eta * len(session.data)))
        scores = bandit.scores()
        if self.select == "random":
            scores = 0.0 * scores
        if self.elastic and self.thrift and here:
            sent = 4 * self.local.batch * torch.Size(session.shape).numel()
            macs = self.local.batch * session.device_macs
            for client in here:
                scores[client] /= floor.strain(client, macs, sent) ** self.thrift
        return best(scores, here, count, stream(session.seed, "orchestrator", *place))

    def _own(self, output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """Return a client's own loss."""
        embedding, activation = output
        felt = 0.0 * embedding.sum()
        if self.objective == "contrast":
            felt = felt + nt_xent(embedding, labels, self.tau)
        if self.beta:
            felt = felt + self.beta * activation.abs().sum()
        return felt

    def _begun(
        self,
        session: Session,
        floor: Floor,
        place: tuple[int, int],
        lr: float,
        chosen: list[int],
        client: int,
    ) -> Begun | None:
        """Let a client begin a mini-batch; return None if it cannot."""
        samples = session.size(client, place[1])
        turn = Turn(*place, lr, self._rates(session, floor, client, samples), client in chosen)
        subnet = drawn(session.device, turn, session.seed, client)
        work = session.device_work(samples, subnet, trains=self.trains)
        if not floor.compute(client, Work(work.forward, work.forward, samples)):
            return None
        if not session.is_dry:
            session.clients[client].ask(turn)
        return Begun(turn, work)

    def _rates(
        self, session: Session, floor: Floor, client: int, samples: int
    ) -> tuple[float, ...]:
        """Choose how many filters a client leaves out."""
        if not self.elastic:
            return ()
        table = fitting(self.table, session.device)
        full = samples * session.device.macs(session.device.full, training=True)
        share = np.array([floor.share(client, full)])
        return table.rates[int(Rows(table.shares).fit(share)[0])]

    def _ended(self, session: Session, floor: Floor, client: int, begun: Begun) -> float | None:
        """Let a client end a mini-batch; return the server's loss if it has talked."""
        turn, work = begun
        samples = work.samples
        shape = (samples, *session.shape)
        backward = Work(work.macs - work.forward, 0.0, 0)
        loss = None
        if session.is_dry:
            if turn.talks:
                floor.send(client, None, shape, self.payload)
                floor.serve(client, session.server_work(samples, back=self.gradient))
                if self.gradient:
                    entries = torch.Size(shape).numel()
                    size = self.payload.dense(entries)
                    floor.give_back(client, size, dense=4 * entries, nonzero=4 * entries)
                loss = 1.0
            floor.compute(client, backward)
            return loss
        device, body = session.clients[client], None
        if turn.talks:
            message = device.message()
            if message is None:
                return None
            got = floor.send(client, message, shape, self.payload)
            if got is not None:
                floor.serve(client, session.server_work(samples, back=self.gradient))
                loss, slope = session.served.step(client, *got, turn.lr, back=self.gradient)
                floor.note(client, loss)
                if slope is not None:
                    body = self.payload.encode(slope)
                    nonzero = 4 * int(torch.count_nonzero(got[0]))
                    floor.give_back(client, len(body), dense=4 * slope.numel(), nonzero=nonzero)
        if self.trains and floor.compute(client, backward):
            device.learn(body)
        else:
            device.drop()
        return loss

    def _relayed(self, session: Session, floor: Floor, client: int, here: list[int]) -> None:
        """Give a client's part to the next one, as the authors' code does."""
        if self.relay and len(here) > 1:
            taker = here[(here.index(client) + 1) % len(here)]
            floor.hand_over(client, taker, session.device_bytes)
            session.clients[taker].take(session.clients[client].params)
