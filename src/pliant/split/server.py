"""The server's part: one for all clients, or weights in common under a mask for each client.

Chopra et al., AdaSplit, 2021: the effective weights of client i are ``W · sigmoid(m_i)``.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.nn.elastic import Elastic
from pliant.nn.optimiser import Optimiser
from pliant.params import Params, clone
from pliant.rng import stream
from pliant.split.part import Part, below, move

Answer = tuple[float, Tensor | None]  # the loss, and the activations' gradient where wanted


class Server(Protocol):
    """What the server has, and how it learns from one client's activations."""

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, back: bool
    ) -> Answer:
        """Train on a mini-batch; return its loss and, if wanted, what goes back."""

    def effective(self, client: int) -> Params:
        """Return the parameters that a client is served with."""

    def state(self) -> Params:
        """Return everything as named tensors."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""


class Common:
    """One part for all clients."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, back: bool
    ) -> Answer:
        given = activation.detach().requires_grad_(back)
        done = self.part.run(self.part.net.full, given)
        loss = F.cross_entropy(done.output, labels)
        leaves = list(done.leaves.values())
        grads = torch.autograd.grad(loss, [*leaves, *([given] if back else [])], allow_unused=True)
        self.part.descend(done, grads[: len(leaves)], lr)
        return float(loss.detach()), grads[-1] if back else None

    def effective(self, client: int) -> Params:
        return self.part.params

    def state(self) -> Params:
        return self.part.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.part.restore(state)


Penalised = Literal["own", "all"]


class Masked:
    """Weights in common, and for each client a logit for every one of them.

    A client that comes without a mask is given one, drawn from N(0, 1) at its own address.
    """

    def __init__(
        self,
        net: Elastic,
        params: Params,
        optimiser: Optimiser,
        *,
        penalty: float,
        penalised: Penalised,
        seed: int,
    ) -> None:
        self.part = Part(net, params, optimiser)
        self.masks: dict[int, Part] = {}
        # the part is large: fresh memory for every step would cost more than the arithmetic
        self._gates = {name: torch.empty_like(self.part.params[name]) for name in self.part.names}
        self._scratch = clone(self._gates)
        self.penalty = penalty
        self.penalised = penalised
        self.seed = seed

    def mask(self, client: int) -> Part:
        """Return a client's logits."""
        if client not in self.masks:
            rng = stream(self.seed, "mask", client)
            logits = {
                name: torch.from_numpy(
                    rng.standard_normal(tuple(self.part.params[name].shape), np.float32)
                )
                for name in self.part.names
            }
            self.masks[client] = Part(self.part.net, logits, self.part.optimiser)
        return self.masks[client]

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, back: bool
    ) -> Answer:
        part, logits = self.part, self.mask(client).params
        for name in part.names:
            torch.sigmoid(logits[name], out=self._gates[name])
            torch.mul(part.params[name], self._gates[name], out=self._scratch[name])
        leaves = {name: self._scratch[name].detach().requires_grad_() for name in part.names}
        given = activation.detach().requires_grad_(back)
        net = part.net
        output = net.run({**part.params, **leaves}, net.bind(net.full), given)
        loss = F.cross_entropy(output, labels)
        wanted = [*leaves.values(), *([given] if back else [])]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        with torch.no_grad():
            self._move(client, dict(zip(part.names, grads, strict=False)), lr)
        return float(loss.detach()), grads[-1] if back else None

    def _move(self, client: int, grads: Mapping[str, Tensor | None], lr: float) -> None:
        part, mask = self.part, self.masks[client]
        felt = {name: grad for name, grad in grads.items() if grad is not None}
        of_mask = []
        for name, grad in felt.items():
            gate = self._gates[name]
            # (dL/dw · w + penalty) · slope of the sigmoid
            found = torch.mul(grad, part.params[name], out=self._scratch[name])
            of_mask.append(found.add_(self.penalty).mul_(gate))
            grad.mul_(gate)
            found.mul_(gate.neg_().add_(1.0))
        _stepped(part, list(felt), list(felt.values()), lr)
        _stepped(mask, list(felt), of_mask, lr)
        if self.penalised == "all":
            for other, logits in self.masks.items():
                if other != client:
                    slopes = [torch.sigmoid(logits.params[name]) for name in part.names]
                    shrunk = [(s - s.square()).mul_(self.penalty) for s in slopes]
                    _stepped(logits, part.names, shrunk, lr)

    def effective(self, client: int, threshold: float = 0.0) -> Params:
        """Return a client's weights; with a threshold, gates below it are shut."""
        found = clone(self.part.params)
        logits = self.mask(client).params
        for name in self.part.names:
            gate = torch.sigmoid(logits[name])
            if threshold:
                gate = torch.where(gate < threshold, 0.0, gate)
            found[name] *= gate
        return found

    def state(self) -> Params:
        found = {f"shared/{name}": tensor for name, tensor in self.part.state().items()}
        for client, logits in self.masks.items():
            found |= {f"mask{client}/{name}": tensor for name, tensor in logits.state().items()}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.part.restore(below("shared", state))
        clients = {name.partition("/")[0] for name in state} - {"shared"}
        for client in sorted(int(name.removeprefix("mask")) for name in clients):
            self.mask(client).restore(below(f"mask{client}", state))


def _stepped(part: Part, names: list[str], grads: list[Tensor], lr: float) -> None:
    part.time += 1
    memory = [[kind[name] for name in names] for kind in part.memory]
    move(part.optimiser, [part.params[name] for name in names], grads, memory, lr, part.time)
