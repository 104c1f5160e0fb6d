"""The server's part: one for all clients, or shared weights with a mask per client.

Chopra et al., AdaSplit, 2021: the effective weights of client i are ``W · sigmoid(m_i)``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.nn.elastic import Elastic
from pliant.params import Params, clone, flatten, get_params, group_subtrees
from pliant.rng import rng_stream
from pliant.split.part import TrainablePart

LabelledActivations = tuple[Tensor, Tensor]
ServerStepResult = tuple[float, Tensor | None]  # the loss and the gradient of the activations


class ServerPart(Protocol):
    """The server's part, which trains on the activations of one client at a time."""

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, needs_gradient: bool
    ) -> ServerStepResult:
        """Train on a mini-batch; return its loss and, if needed, the activations' gradient."""

    def step_joined(
        self, batches: Mapping[int, LabelledActivations], lr: float, *, needs_gradient: bool
    ) -> dict[int, ServerStepResult]:
        """Train once on the mini-batches of several clients together.

        The loss is the mean over all samples; each client gets the gradient of its own mean.
        """

    def effective_params(self, client: int, threshold: float = 0.0) -> Params:
        """Return the parameters that apply to a client, with gates below the threshold closed."""

    def state_dict(self) -> Params: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class SharedServer(TrainablePart):
    """One part for all clients."""

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, needs_gradient: bool
    ) -> ServerStepResult:
        x = activation.detach().requires_grad_(needs_gradient)
        forward_pass = self.run(self.net.full, x)
        loss = F.cross_entropy(forward_pass.output, labels)
        leaves = list(forward_pass.leaves.values())
        inputs = [*leaves, x] if needs_gradient else leaves
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        self.apply_gradients(forward_pass, grads[: len(leaves)], lr)
        return float(loss.detach()), grads[-1] if needs_gradient else None

    def step_joined(
        self, batches: Mapping[int, LabelledActivations], lr: float, *, needs_gradient: bool
    ) -> dict[int, ServerStepResult]:
        sizes = [len(labels) for _, labels in batches.values()]
        x = torch.cat([activation for activation, _ in batches.values()]).detach()
        labels = torch.cat([labels for _, labels in batches.values()])
        forward_pass = self.run(self.net.full, x.requires_grad_(needs_gradient))
        losses = F.cross_entropy(forward_pass.output, labels, reduction="none")
        leaves = list(forward_pass.leaves.values())
        inputs = [*leaves, x] if needs_gradient else leaves
        grads = torch.autograd.grad(losses.mean(), inputs, allow_unused=True)
        self.apply_gradients(forward_pass, grads[: len(leaves)], lr)
        parts: Sequence[Tensor | None] = [None] * len(sizes)
        if needs_gradient:
            grad = grads[-1]
            assert grad is not None
            scaled = zip(torch.split(grad, sizes), sizes, strict=True)
            parts = [part * (len(labels) / size) for part, size in scaled]
        means = [float(part.mean()) for part in torch.split(losses.detach(), sizes)]
        return dict(zip(batches, zip(means, parts, strict=True), strict=True))

    def effective_params(self, client: int, threshold: float = 0.0) -> Params:
        return self.params


class ServerCopies:
    """One copy of the part per client, each with its own optimiser state.

    A client is evaluated with the common part or, if copies are personal, with its own.
    """

    def __init__(
        self,
        common: SharedServer,
        *,
        is_personal: bool = False,
        get_net: Callable[[int], Elastic] | None = None,  # of a client, if cuts differ
    ) -> None:
        self.common, self.is_personal = common, is_personal  # common: what all copies start from
        self._get_net = get_net or (lambda client: common.net)
        self.copies: dict[int, SharedServer] = {}

    def get_copy(self, client: int) -> SharedServer:
        if client not in self.copies:
            common, net = self.common, self._get_net(client)
            params = {name: common.params[name] for name in get_params(net.module)}
            self.copies[client] = SharedServer(net, params, common.optimiser)
        return self.copies[client]

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, needs_gradient: bool
    ) -> ServerStepResult:
        return self.get_copy(client).step(
            client, activation, labels, lr, needs_gradient=needs_gradient
        )

    def step_joined(
        self, batches: Mapping[int, LabelledActivations], lr: float, *, needs_gradient: bool
    ) -> dict[int, ServerStepResult]:
        return {  # a copy sees only its own client
            client: self.step(client, *batch, lr, needs_gradient=needs_gradient)
            for client, batch in batches.items()
        }

    def load_params(self, params: Mapping[str, Tensor]) -> None:
        """Replace the parameters of all copies; keep their optimisers' states."""
        for part in (self.common, *self.copies.values()):
            part.load_params({name: params[name] for name in part.params})

    def effective_params(self, client: int, threshold: float = 0.0) -> Params:
        part = self.copies.get(client, self.common) if self.is_personal else self.common
        return part.params

    def state_dict(self) -> Params:
        copies = {f"copy{client}": copy.state_dict() for client, copy in self.copies.items()}
        return flatten({"common": self.common.state_dict(), **copies})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        groups = group_subtrees(state)
        self.common.load_state_dict(groups.pop("common"))
        self.copies.clear()  # a copy that was made later starts anew
        for name, copy_state in groups.items():
            self.get_copy(int(name.removeprefix("copy"))).load_state_dict(copy_state)


PenaltyScope = Literal["own", "all"]


class MaskedServer:
    """Shared weights, and per client one logit for every weight.

    A client's logits are drawn from N(0, 1) at its own random address when they are first needed.
    """

    def __init__(
        self,
        part: TrainablePart,
        clients: int,
        *,
        penalty: float,
        penalised: PenaltyScope,
        seed: int,
    ) -> None:
        self.part, self.clients, self.seed = part, clients, seed
        self.penalty, self.penalised = penalty, penalised
        self.masks: dict[int, TrainablePart] = {}
        # the part is large: allocating memory in every step would cost more than the arithmetic
        self._gates = {name: torch.empty_like(part.params[name]) for name in part.trained_names}
        self._scratch = clone(self._gates)

    def get_mask(self, client: int) -> TrainablePart:
        if client not in self.masks:
            rng, params = rng_stream(self.seed, "mask", client), self.part.params
            logits = {
                name: torch.from_numpy(rng.standard_normal(tuple(params[name].shape), np.float32))
                for name in self.part.trained_names
            }
            self.masks[client] = TrainablePart(self.part.net, logits, self.part.optimiser)
        return self.masks[client]

    def step(
        self, client: int, activation: Tensor, labels: Tensor, lr: float, *, needs_gradient: bool
    ) -> ServerStepResult:
        part, logits = self.part, self.get_mask(client).params
        for name in part.trained_names:
            torch.sigmoid(logits[name], out=self._gates[name])
            torch.mul(part.params[name], self._gates[name], out=self._scratch[name])
        leaves = {n: self._scratch[n].detach().requires_grad_() for n in part.trained_names}
        x = activation.detach().requires_grad_(needs_gradient)
        output = part.net.run({**part.params, **leaves}, part.net.bind(part.net.full), x)
        loss = F.cross_entropy(output, labels)
        inputs = [*leaves.values(), *([x] if needs_gradient else [])]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        with torch.no_grad():
            self._update_weights(client, dict(zip(part.trained_names, grads, strict=False)), lr)
        return float(loss.detach()), grads[-1] if needs_gradient else None

    def _update_weights(self, client: int, grads: Mapping[str, Tensor | None], lr: float) -> None:
        part, mask = self.part, self.masks[client]
        weight_grads = {name: grad for name, grad in grads.items() if grad is not None}
        mask_grads = {}
        for name, grad in weight_grads.items():
            gate = self._gates[name]
            # (dL/dw · w + penalty) · slope of the sigmoid
            mask_grad = torch.mul(grad, part.params[name], out=self._scratch[name])
            mask_grads[name] = mask_grad.add_(self.penalty).mul_(gate)
            grad.mul_(gate)
            mask_grad.mul_(gate.neg_().add_(1.0))
        part.step_params(weight_grads, lr)
        mask.step_params(mask_grads, lr)
        self._shrink_other_masks([client], lr)

    def _shrink_other_masks(self, trained: Collection[int], lr: float) -> None:
        for client in range(self.clients) if self.penalised == "all" else ():
            if client not in trained:
                mask, names = self.get_mask(client), self.part.trained_names
                gates = {name: torch.sigmoid(mask.params[name]) for name in names}
                slopes = {n: (gate - gate.square()).mul_(self.penalty) for n, gate in gates.items()}
                mask.step_params(slopes, lr)

    def step_joined(
        self, batches: Mapping[int, LabelledActivations], lr: float, *, needs_gradient: bool
    ) -> dict[int, ServerStepResult]:
        part, results = self.part, {}
        samples = sum(len(labels) for _, labels in batches.values())
        weight_grads: Params = {}
        mask_grads: dict[int, Params] = {client: {} for client in batches}
        for client, (activation, labels) in batches.items():
            logits = self.get_mask(client).params
            gates = {name: torch.sigmoid(logits[name]) for name in part.trained_names}
            leaves = {n: (part.params[n] * gate).requires_grad_() for n, gate in gates.items()}
            x = activation.detach().requires_grad_(needs_gradient)
            output = part.net.run({**part.params, **leaves}, part.net.bind(part.net.full), x)
            loss = F.cross_entropy(output, labels)
            inputs = [*leaves.values(), *([x] if needs_gradient else [])]
            grads = torch.autograd.grad(loss, inputs, allow_unused=True)
            for (name, gate), grad in zip(gates.items(), grads, strict=False):
                if grad is not None:
                    slope = gate - gate.square()
                    mask_grads[client][name] = (grad * part.params[name] + self.penalty) * slope
                    weighted = grad * gate * (len(labels) / samples)
                    weight_grads[name] = weight_grads.get(name, 0.0) + weighted
            results[client] = float(loss.detach()), grads[-1] if needs_gradient else None
        with torch.no_grad():
            part.step_params(weight_grads, lr)
            for client, gradients in mask_grads.items():
                self.masks[client].step_params(gradients, lr)
            self._shrink_other_masks(batches, lr)
        return results

    def effective_params(self, client: int, threshold: float = 0.0) -> Params:
        params, logits = clone(self.part.params), self.get_mask(client).params
        for name in self.part.trained_names:
            gate = torch.sigmoid(logits[name])
            if threshold:
                gate = torch.where(gate < threshold, 0.0, gate)
            params[name] *= gate
        return params

    def state_dict(self) -> Params:
        masks = {f"mask{client}": mask.state_dict() for client, mask in self.masks.items()}
        return flatten({"shared": self.part.state_dict(), **masks})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        groups = group_subtrees(state)
        self.part.load_state_dict(groups.pop("shared"))
        self.masks.clear()  # a mask that was made later is drawn anew
        for client in sorted(int(name.removeprefix("mask")) for name in groups):
            self.get_mask(client).load_state_dict(groups[f"mask{client}"])
