"""One-shot split learning: clients send their activations once, and the server trains on them.

Ampere, arXiv 2507.07130: clients train their parts by an auxiliary loss and average them; then the
server trains on the pooled, shuffled activations of all clients. pliant adds a third phase, in
which the server trains one copy of its part per client on that client's activations, and can vary
what it was sent: shifts and mixtures of a client's activations cost the client nothing.
"""

from functools import partial
from typing import ClassVar

from torch import nn

from pliant.nn.pareto_table import ParetoTable
from pliant.rng import rng_stream
from pliant.split.affordable import choose_affordable_rates
from pliant.split.base import SplitTraining
from pliant.split.client_module import compute_auxiliary_loss, make_classifier
from pliant.split.exchange import SplitRound
from pliant.split.kept import interleave, shuffle_images
from pliant.split.payload import Payload
from pliant.split.server import ServerCopies
from pliant.split.session import Session
from pliant.split.variation import vary_activations
from pliant.value import Count, Fraction, Natural, NonNegative, Value


class OneShotSplit(Value, frozen=True, tag="oneshot"):
    """A local phase, one transfer of activations, then phases in which only the server works.

    Ampere has `personal_share=0`.

    >>> import pliant as pl
    >>> pl.OneShotSplit(local_share=0.0).payload.dtype
    'int8'
    """

    slide: ClassVar[tuple[str, ...]] = ()
    threshold: ClassVar[float] = 0.0

    cut: str = "stage1"  # the last layer of the client's part
    local: SplitTraining = SplitTraining()
    payload: Payload = Payload(dtype="int8")
    local_share: Fraction = 0.1  # of the rounds: clients train, nothing else is sent
    personal_share: Fraction = 0.3  # of the rounds, at the end: one server copy per client
    federate: bool = True  # average the clients' parts after every local round
    passes: Count = 4  # of the server over all activations in each of its rounds
    pooled: bool = True  # mini-batches with images of all clients; else of one after another
    shift: Natural = 0  # cells by which the server shifts kept feature maps at random
    mixup: NonNegative = 0.0  # Beta parameter of the mixtures of a client's kept activations
    send_once: Count = 10**9  # bytes of activations that the server may keep
    elastic: bool = False  # in the local phase, clients drop filters to fit their speed
    table: ParetoTable | None = None  # of the client's part with its head; None: equal rates

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.local_share + self.personal_share > 1:
            raise ValueError(
                "Expected local_share and personal_share of at most 1 together, got "
                f"{self.local_share:g} and {self.personal_share:g}"
            )
        if self.local.augment is not None:
            raise ValueError(
                "Expected no local.augment with activations that are sent once: augmented images "
                "differ at every visit"
            )

    @property
    def shares_parts(self) -> bool:
        return self.federate

    def make_head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return make_classifier(shape, classes)

    def set_up(self, session: Session) -> ServerCopies:
        session.make_clients(
            (lambda _: session.template) if self.federate else session.make_client_module,
            compute_auxiliary_loss,
        )
        session.keep_activations(self.send_once)
        return ServerCopies(session.make_server(), is_personal=True)

    def train(self, split_round: SplitRound) -> None:
        number, rounds = split_round.number, split_round.rounds
        lr = self.local.lr_at(number)
        if number < int(self.local_share * rounds + 1e-9):
            self._train_clients(split_round, lr)
            return
        self._collect_activations(split_round, lr)
        is_personal = number >= rounds - int(self.personal_share * rounds + 1e-9)
        for number_of_pass in range(self.passes):
            self._train_server(split_round, lr, number_of_pass, is_personal=is_personal)
        if number + 1 == rounds and split_round.session.kept is not None:
            split_round.session.kept.clear()

    def _train_clients(self, split_round: SplitRound, lr: float) -> None:
        for step in range(split_round.session.iterations):
            batches = []
            for client in split_round.environment.available_clients():
                rates: tuple[float, ...] = ()
                if self.elastic:
                    rates = choose_affordable_rates(split_round, client, self.table)
                batches.append(
                    split_round.start_batch(client, step, lr, rates=rates, needs_activation=False)
                )
            split_round.finish_batches(batches, joined=False, needs_gradient=False)
        if self.federate:
            split_round.average_parts()

    def _collect_activations(self, split_round: SplitRound, lr: float) -> None:
        """Let clients send what the server does not keep yet."""
        session = split_round.session
        for step in range(session.iterations):
            batches = [
                split_round.start_batch(client, step, lr, is_trained=False)
                for client in split_round.environment.available_clients()
                if step < session.num_batches(client) and not split_round.has_kept(client, step)
            ]
            split_round.keep_batches(batches)

    def _train_server(
        self, split_round: SplitRound, lr: float, number_of_pass: int, *, is_personal: bool
    ) -> None:
        """Make one pass over all kept activations, varied at random."""
        session, address = split_round.session, (split_round.number, number_of_pass)
        server, kept = session.server, session.kept
        assert isinstance(server, ServerCopies)
        assert kept is not None
        seed, images = session.seed, kept.list_images()
        if self.pooled and not is_personal:
            rng = rng_stream(seed, "pool", *address)
            batches = shuffle_images(images, self.local.batch, rng)
        else:
            batches = interleave(
                shuffle_images({client: own}, self.local.batch, rng)
                for client, own in images.items()
                for rng in [rng_stream(seed, "pool", *address, client)]
            )
        vary = partial(
            vary_activations,
            classes=session.data.train.classes,
            rng=rng_stream(seed, "vary", *address),
            shift=self.shift,
            mixup=self.mixup,
        )
        for batch in batches:
            split_round.train_on_kept(batch, lr, server if is_personal else server.common, vary)
