"""AdaSplit: clients train on a loss of their own, and only a few use the server at a time.

Chopra et al., "AdaSplit: Adaptive Trade-offs for Resource-constrained Distributed Deep Learning",
2021. With `elastic` it is pliant's own hybrid with Rapp et al., "DISTREAL", AAAI 2022: a client
drops filters before every mini-batch to fit its current speed, and the orchestrator divides a
client's score by the cost of its update.
"""

from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from pliant.nn.pareto_table import ParetoTable
from pliant.rng import rng_stream
from pliant.split.affordable import choose_affordable_rates
from pliant.split.bandit import Bandit, select_top_clients
from pliant.split.base import SplitTraining
from pliant.split.client_module import make_projection_head, nt_xent
from pliant.split.exchange import OpenBatch, SplitRound
from pliant.split.payload import Payload
from pliant.split.server import MaskedServer, PenaltyScope
from pliant.split.session import Session
from pliant.value import Fraction, Natural, NonNegative, Positive, Value


class AdaSplit(Value, frozen=True, tag="adasplit"):
    """A local phase, then a global one in which selected clients train masked server weights.

    Greek letters are the paper's. docs/split.md explains the fields for choices it leaves open.

    >>> import pliant as pl
    >>> pl.AdaSplit(kappa=0.75, eta=0.4).select
    'ucb'
    """

    slide: ClassVar[tuple[str, ...]] = ()

    cut: str = "stage1"  # the last layer of the client's part (mu)
    local: SplitTraining = SplitTraining()
    payload: Payload = Payload()
    kappa: Fraction = 0.6  # share of rounds in the local phase, without traffic
    eta: Annotated[float, Meta(gt=0.0, le=1.0)] = (
        0.6  # share of a round's clients selected at a time
    )
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
    send_once: Natural = 0  # bytes of activations that the server may keep; 0: none
    joined: bool = False  # the server trains once on the selected clients' mini-batches together
    elastic: bool = False
    table: ParetoTable | None = None  # of the client's part with its head; None: equal rates
    cost_exponent: NonNegative = 1.0  # of costs in client selection; elastic only

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.elastic and not self.has_head:
            raise ValueError("Expected `head` and an objective for an elastic client, got none")
        if self.joined and (self.relay or self.send_once):
            raise ValueError("Expected neither `relay` nor `send_once` with `joined`, got one")
        if self.send_once:
            self._check_sent_once()

    def _check_sent_once(self) -> None:
        """Refuse settings under which an image's activations change."""
        if self.is_client_trained or self.relay:
            raise ValueError(
                'Expected clients that do not change for `send_once` (objective = "none", no '
                f"gradient, beta or relay), got {'relay' if self.relay else 'trained clients'}"
            )
        if self.local.augment is not None:
            raise ValueError(
                "Expected no local.augment with `send_once`: augmented images differ at every visit"
            )

    @property
    def has_head(self) -> bool:
        return self.head and self.objective == "contrast"

    @property
    def shares_parts(self) -> bool:
        return self.relay

    @property
    def is_client_trained(self) -> bool:
        return self.objective == "contrast" or self.gradient or self.beta > 0

    def make_head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return make_projection_head(shape) if self.has_head else nn.Identity()

    def set_up(self, session: Session) -> MaskedServer:
        session.make_clients(session.make_client_module, self._compute_local_loss)
        if self.send_once:
            session.keep_activations(self.send_once)
        return MaskedServer(
            session.make_server(),
            len(session.data),
            penalty=self.penalty,
            penalised=self.penalised,
            seed=session.seed,
        )

    def train(self, split_round: SplitRound) -> None:
        session, environment = split_round.session, split_round.environment
        local_rounds = int(self.kappa * split_round.rounds + 1e-9)
        is_local = split_round.number < local_rounds
        lr = self.local.lr_at(split_round.number, local_rounds)
        bandit = Bandit(len(session.data), self.gamma)
        if "bandit" in session.method_state:
            bandit.load_state_dict(session.method_state["bandit"])
        for step in range(session.iterations):
            clients = environment.available_clients()
            selected: list[int] = []
            if not is_local:
                selected = self._select_clients(split_round, step, bandit, clients)
            start = partial(self._start_batch, split_round, step, lr, selected)
            # without relay all clients start before the first is waited for
            batches = {} if self.relay else {client: start(client) for client in clients}
            joined_losses: dict[int, float] = {}
            if self.joined:
                joined_losses = split_round.finish_batches(
                    list(batches.values()), joined=True, needs_gradient=self.gradient
                )
            losses = {}
            for number, client in enumerate(clients):
                batch = start(client) if self.relay else batches[client]
                loss = joined_losses.get(client)
                if batch is not None and not self.joined:
                    loss = split_round.finish_batch(
                        batch, session.server, needs_gradient=self.gradient
                    )
                elif client in selected and split_round.has_kept(client, step):
                    images = session.list_images(client, split_round.number, step)
                    loss = split_round.train_on_kept({client: images}, lr)[client]
                if client in selected:  # a rejected message counts as a selection too
                    imputed = float(bandit.last_losses[:, client].mean())
                    losses[client] = imputed if loss is None else loss
                if self.relay and len(clients) > 1:  # as the authors' code does
                    split_round.transfer_part(client, clients[(number + 1) % len(clients)])
            if not is_local:
                bandit.update(losses)
                if not self.send_once or any(batches.values()):  # else no client has done anything
                    environment.barrier()
        session.method_state["bandit"] = bandit.state_dict()
        if session.kept is not None and split_round.number + 1 == split_round.rounds:
            session.kept.clear()

    def _select_clients(
        self, split_round: SplitRound, step: int, bandit: Bandit, available: list[int]
    ) -> list[int]:
        session, environment = split_round.session, split_round.environment
        count = max(1, round(self.eta * len(split_round.clients)))
        scores = bandit.compute_scores()
        if self.select == "random":
            scores = 0.0 * scores
        if self.elastic and self.cost_exponent:
            upload = 4 * self.local.batch * torch.Size(session.activation_shape).numel()
            macs = self.local.batch * session.device_macs
            for client in available:
                scores[client] /= environment.slowdown(client, macs, upload) ** self.cost_exponent
        rng = rng_stream(session.seed, "orchestrator", split_round.number, step)
        return select_top_clients(scores, available, count, rng)

    def _compute_local_loss(self, output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        embedding, activation = output
        loss = 0.0 * embedding.sum()
        if self.objective == "contrast":
            loss = loss + nt_xent(embedding, labels, self.tau)
        if self.beta:
            loss = loss + self.beta * activation.abs().sum()
        return loss

    def _start_batch(
        self, split_round: SplitRound, step: int, lr: float, selected: list[int], client: int
    ) -> OpenBatch | None:
        if self.send_once and (client not in selected or split_round.has_kept(client, step)):
            return None
        rates: tuple[float, ...] = ()
        if self.elastic:
            rates = choose_affordable_rates(split_round, client, self.table)
        return split_round.start_batch(
            client,
            step,
            lr,
            rates=rates,
            needs_activation=client in selected,
            is_trained=self.is_client_trained,
        )
