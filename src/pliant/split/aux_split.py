"""Split learning by auxiliary losses: clients train without any gradient from the server.

Han et al., "Accelerating federated learning with split learning on locally generated losses", 2021
(a copy of the server's part per client); CSE-FSL, arXiv 2507.15816 (one part, and activations of
every h-th mini-batch only); FSL-SAGE, arXiv 2505.23182 (the server aligns the clients' auxiliary
classifiers with its own gradients).
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pliant.nn.pareto_table import ParetoTable
from pliant.params import Params, clone, flatten, group_subtrees
from pliant.split.affordable import choose_affordable_rates
from pliant.split.base import SplitTraining
from pliant.split.client_module import compute_auxiliary_loss, make_classifier
from pliant.split.exchange import SplitRound
from pliant.split.payload import Payload
from pliant.split.server import (
    LabelledActivations,
    MaskedServer,
    ServerCopies,
    ServerPart,
    ServerStepResult,
)
from pliant.split.session import Session
from pliant.value import Count, Natural, NonNegative, Positive, Value


class AuxSplit(Value, frozen=True, tag="auxsplit"):
    """Clients train their parts by an auxiliary classifier; only activations are sent, up.

    The defaults are CSE-FSL. Local-loss SplitFed is `every=1, server="copies"`; FSL-SAGE has
    `align` above 0.

    >>> import pliant as pl
    >>> pl.AuxSplit(align=10).every
    5
    """

    slide: ClassVar[tuple[str, ...]] = ()
    threshold: ClassVar[float] = 0.0

    cut: str = "stage1"  # the last layer of the client's part
    local: SplitTraining = SplitTraining()
    payload: Payload = Payload()
    every: Count = 5  # h: activations are sent once in so many mini-batches
    align: Natural = 0  # l: rounds from one alignment to the next; 0: clients train the classifier
    align_steps: Count = 100
    align_lr: Positive = 1e-3
    buffer: Count = 1000  # newest activations per client that the server keeps to align
    federate: bool = True  # average the clients' parts every round
    server: Literal["shared", "copies", "masks"] = "shared"
    penalty: NonNegative = 1e-4  # on the sum of a mask's gates
    joined: bool = False  # the server trains once on all clients' mini-batches together
    elastic: bool = False  # clients drop filters to fit their speed
    table: ParetoTable | None = None  # of the client's part with its head; None: equal rates

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.server == "copies" and (self.align or self.joined or not self.federate):
            raise ValueError(
                'Expected `federate` and neither `align` nor `joined` with server = "copies", got '
                f"federate = {self.federate}, align = {self.align}, joined = {self.joined}"
            )

    @property
    def shares_parts(self) -> bool:
        return self.federate or self.align > 0

    def make_head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return make_classifier(shape, classes)

    def set_up(self, session: Session) -> ServerPart:
        session.make_clients(
            (lambda _: session.template) if self.federate else session.make_client_module,
            compute_auxiliary_loss,
            trains_head=not self.align,
        )
        server: ServerPart = session.make_server()
        if self.server == "copies":
            server = ServerCopies(session.make_server())
        elif self.server == "masks":
            server = MaskedServer(
                session.make_server(),
                len(session.data),
                penalty=self.penalty,
                penalised="own",
                seed=session.seed,
            )
        return BufferedServer(server, self.buffer) if self.align else server

    def train(self, split_round: SplitRound) -> None:
        session, number = split_round.session, split_round.number
        lr = self.local.lr_at(number)
        for step in range(session.iterations):
            is_sent = step % self.every == 0
            batches = []
            for client in split_round.environment.available_clients():
                rates: tuple[float, ...] = ()
                if self.elastic:
                    rates = choose_affordable_rates(split_round, client, self.table)
                batches.append(
                    split_round.start_batch(client, step, lr, rates=rates, needs_activation=is_sent)
                )
            split_round.finish_batches(batches, joined=self.joined, needs_gradient=False)
        is_aligned = self.align > 0 and number % self.align == 0
        change = partial(self._align, session) if is_aligned else None
        if self.federate:
            split_round.average_copies(split_round.average_parts(change))
        elif change is not None:
            split_round.change_parts(change)

    def _align(self, session: Session, params: Params, clients: list[int]) -> Params:
        """Train a part's classifier to give the server's gradients of what clients have sent."""
        server = session.server
        assert isinstance(server, BufferedServer)
        batches = {client: server.batches[client] for client in clients if client in server.batches}
        targets = {
            client: compute_activation_gradient(
                session.split_network.server, clone(server.effective_params(client)), batch
            )
            for client, batch in batches.items()
        }
        head = {
            name: tensor.clone().requires_grad_(tensor.is_floating_point())
            for name, tensor in params.items()
            if name.startswith("head.")
        }
        leaves = [tensor for tensor in head.values() if tensor.requires_grad]
        optimiser = torch.optim.Adam(leaves, lr=self.align_lr)
        named = {name.removeprefix("head."): tensor for name, tensor in head.items()}
        for _ in range(self.align_steps if batches else 0):
            optimiser.zero_grad()
            for client, batch in batches.items():
                gradient = compute_activation_gradient(
                    session.template.head, named, batch, create_graph=True
                )
                (gradient - targets[client]).square().sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return {**params, **{name: tensor.detach() for name, tensor in head.items()}}


def compute_activation_gradient(
    module: nn.Module, params: Params, batch: LabelledActivations, *, create_graph: bool = False
) -> Tensor:
    """Return the gradient of each sample's cross-entropy with respect to its activation."""
    activation = batch[0].detach().requires_grad_()
    output = functional_call(module, params, (activation,))
    loss = F.cross_entropy(output, batch[1], reduction="sum")
    return torch.autograd.grad(loss, activation, create_graph=create_graph)[0]


class BufferedServer:
    """A server's part that keeps the newest activations of each client."""

    def __init__(self, part: ServerPart, size: int) -> None:
        self.part, self.size = part, size
        self.batches: dict[int, LabelledActivations] = {}

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, needs_gradient: bool
    ) -> ServerStepResult:
        self._keep(client, activation, labels)
        return self.part.step(client, activation, labels, lr, needs_gradient=needs_gradient)

    def step_joined(
        self, batches: Mapping[int, LabelledActivations], lr: float, *, needs_gradient: bool
    ) -> dict[int, ServerStepResult]:
        for client, batch in batches.items():
            self._keep(client, *batch)
        return self.part.step_joined(batches, lr, needs_gradient=needs_gradient)

    def _keep(self, client: int, activation: Tensor, labels: Tensor) -> None:
        old = self.batches.get(client, (activation[:0], labels[:0]))
        self.batches[client] = (
            torch.cat([old[0], activation])[-self.size :],
            torch.cat([old[1], labels])[-self.size :],
        )

    def effective_params(self, client: int, threshold: float = 0.0) -> Params:
        return self.part.effective_params(client, threshold)

    def state_dict(self) -> Params:
        batches = {
            f"buffer{client}": {"activations": activations, "labels": labels}
            for client, (activations, labels) in self.batches.items()
        }
        return flatten({"part": self.part.state_dict(), **batches})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        groups = group_subtrees(state)
        self.part.load_state_dict(groups.pop("part"))
        self.batches.clear()
        for name, batch in groups.items():
            client = int(name.removeprefix("buffer"))
            self.batches[client] = batch["activations"], batch["labels"]
