"""One part of a network in training: its parameters and what the optimiser remembers of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pliant.nn.elastic import Elastic
from pliant.nn.optimiser import Adam, Optimiser
from pliant.nn.plan import Bound
from pliant.nn.subnet import Subnet
from pliant.params import Params, clone


class Part:
    """Parameters and buffers that are trained in place."""

    def __init__(self, net: Elastic, params: Mapping[str, Tensor], optimiser: Optimiser) -> None:
        self.net = net
        self.optimiser = optimiser
        self.params = clone(params)
        self.names = [name for name in self.params if name in net.trained]
        self.memory: list[Params] = []
        self.time = 0
        self.forget()

    def forget(self) -> None:
        """Let the optimiser start anew."""
        self.time = 0
        self.memory = [
            {name: torch.zeros_like(self.params[name]) for name in self.names}
            for _ in range(self.optimiser.memories)
        ]

    def take(self, params: Mapping[str, Tensor]) -> None:
        """Take over another part's parameters; the optimiser's memory stays."""
        self.params = clone(params)

    def run(self, subnet: Subnet, *inputs: Tensor) -> "Pass":
        """Run a sub-network, ready for its gradients."""
        bound = self.net.bind(subnet)
        small = self.params if subnet is self.net.full else self.net.take(self.params, bound)
        leaves = {name: small[name].detach().requires_grad_() for name in self.names}
        output = self.net.run({**small, **leaves}, bound, *inputs)
        return Pass(subnet, bound, small, leaves, output)

    def descend(self, done: "Pass", grads: Sequence[Tensor | None], lr: float) -> None:
        """Move what a pass has used; what the loss did not read stays as it is."""
        used = [name for name, grad in zip(self.names, grads, strict=True) if grad is not None]
        found = [grad for grad in grads if grad is not None]
        self.time += 1
        if done.subnet is self.net.full:
            params = [self.params[name] for name in used]
            memory = [[kind[name] for name in used] for kind in self.memory]
            move(self.optimiser, params, found, memory, lr, self.time)
            return
        small = {name: done.leaves[name].detach() for name in used}
        kinds = [
            self.net.take({name: kind[name] for name in used}, done.bound) for kind in self.memory
        ]
        memory = [[kind[name] for name in used] for kind in kinds]
        move(self.optimiser, list(small.values()), found, memory, lr, self.time)
        # what a norm layer has gathered in the pass goes back too
        self.params = self.net.put(self.params, {**done.small, **small}, done.bound)
        self.memory = [
            self.net.put(old, new, done.bound) for old, new in zip(self.memory, kinds, strict=True)
        ]

    def state(self) -> Params:
        """Return everything as named tensors."""
        found = {f"params/{name}": tensor.clone() for name, tensor in self.params.items()}
        for number, kind in enumerate(self.memory):
            found |= {f"memory{number}/{name}": tensor.clone() for name, tensor in kind.items()}
        return found | {"time": torch.tensor(self.time)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self.params = clone(below("params", state))
        self.memory = [clone(below(f"memory{n}", state)) for n in range(len(self.memory))]
        self.time = int(state["time"])


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass of a part: which entries it used, and what came out."""

    subnet: Subnet
    bound: Bound
    small: Params  # parameters and buffers of the sub-network
    leaves: Params  # those of them that are trained
    output: Any


def below(key: str, state: Mapping[str, Tensor]) -> Params:
    """Return the tensors under a key."""
    start = f"{key}/"
    return {
        name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)
    }


def move(
    optimiser: Optimiser,
    params: list[Tensor],
    grads: list[Tensor],
    memory: list[list[Tensor]],
    lr: float,
    time: int,
) -> None:
    """Let the optimiser move tensors in place."""
    with torch.no_grad():
        if not isinstance(optimiser, Adam) or optimiser.clip:
            optimiser.step(params, grads, memory, lr, time)
            return
        # one pass over memory where the plain form takes a dozen: the server's part is large
        torch._fused_adam_(
            params,
            [grad.contiguous() for grad in grads],
            memory[0],
            memory[1],
            [],
            [torch.tensor(float(time)) for _ in params],
            lr=lr,
            beta1=optimiser.beta1,
            beta2=optimiser.beta2,
            weight_decay=optimiser.weight_decay,
            eps=optimiser.eps,
            amsgrad=False,
            maximize=False,
        )
