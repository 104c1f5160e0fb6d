"""A trainable part of a network: its parameters and optimiser state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pliant.nn.compiler.program import BoundProgram
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Adam, Optimiser
from pliant.nn.subnet import Subnet
from pliant.params import Params, clone, flatten, select_subtree


class TrainablePart:
    """Parameters and buffers, trained in place."""

    def __init__(self, net: Elastic, params: Mapping[str, Tensor], optimiser: Optimiser) -> None:
        self.net, self.optimiser = net, optimiser
        self.params = clone(params)
        self.trained_names = [name for name in self.params if name in net.trainable_names]
        self.reset_optimiser()

    def reset_optimiser(self) -> None:
        self.step_count = 0
        self.optimiser_state: list[Params] = [
            {name: torch.zeros_like(self.params[name]) for name in self.trained_names}
            for _ in range(self.optimiser.num_state_tensors)
        ]

    def load_params(self, params: Mapping[str, Tensor]) -> None:
        """Replace the parameters; keep the optimiser's state."""
        self.params = clone(params)

    def run(self, subnet: Subnet, *inputs: Tensor) -> "ForwardPass":
        """Run a subnet and record what its gradients need."""
        bound = self.net.bind(subnet)
        params = self.params if subnet is self.net.full else self.net.take(self.params, bound)
        leaves = {name: params[name].detach().requires_grad_() for name in self.trained_names}
        output = self.net.run({**params, **leaves}, bound, *inputs)
        return ForwardPass(subnet, bound, params, leaves, output)

    def apply_gradients(
        self, forward_pass: "ForwardPass", grads: Sequence[Tensor | None], lr: float
    ) -> None:
        """Update the parameters that a pass used; skip those without a gradient."""
        pairs = zip(self.trained_names, grads, strict=True)
        named = {name: grad for name, grad in pairs if grad is not None}
        if forward_pass.subnet is self.net.full:
            self.step_params(named, lr)
            return
        bound = forward_pass.bound
        params = {name: forward_pass.leaves[name].detach() for name in named}
        states = [
            self.net.take({name: state[name] for name in named}, bound)
            for state in self.optimiser_state
        ]
        self._step(params, named, states, lr)
        # includes the norm statistics that the pass updated
        self.params = self.net.put(self.params, {**forward_pass.params, **params}, bound)
        self.optimiser_state = [
            self.net.put(old, new, bound)
            for old, new in zip(self.optimiser_state, states, strict=True)
        ]

    def step_params(self, grads: Mapping[str, Tensor], lr: float) -> None:
        """Update full-size parameters in place."""
        self._step(self.params, grads, self.optimiser_state, lr)

    def _step(
        self, params: Params, grads: Mapping[str, Tensor], states: list[Params], lr: float
    ) -> None:
        self.step_count += 1
        optimiser = self.optimiser
        tensors = [params[name] for name in grads]
        state = [[state[name] for name in grads] for state in states]
        with torch.no_grad():
            if not isinstance(optimiser, Adam) or optimiser.clip:
                optimiser.step(tensors, list(grads.values()), state, lr, self.step_count)
                return
            # one pass over memory instead of a dozen, as the server's part is large
            gradients = [grad.contiguous() for grad in grads.values()]
            steps = [torch.tensor(float(self.step_count)) for _ in tensors]
            torch._fused_adam_(
                tensors, gradients, state[0], state[1], [], steps, lr=lr, beta1=optimiser.beta1,
                beta2=optimiser.beta2, weight_decay=optimiser.weight_decay, eps=optimiser.eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip

    def state_dict(self) -> Params:
        memory = {f"memory{n}": clone(state) for n, state in enumerate(self.optimiser_state)}
        time = torch.tensor(self.step_count)
        return flatten({"params": clone(self.params), **memory, "time": time})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.params = clone(select_subtree(state, "params"))
        self.optimiser_state = [
            clone(select_subtree(state, f"memory{n}")) for n in range(len(self.optimiser_state))
        ]
        self.step_count = int(state["time"])


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass of a part: the tensors it used and its output."""

    subnet: Subnet
    bound: BoundProgram
    params: Params  # parameters and buffers of the subnet
    leaves: Params  # the trained ones among them
    output: Any
