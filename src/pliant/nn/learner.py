"""Train a network with another subnet before every mini-batch, touching only what is kept."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pliant.nn import packing
from pliant.nn.elastic import Elastic
from pliant.nn.optimiser import Optimiser, State
from pliant.nn.plan import Bound
from pliant.nn.subnet import Subnet
from pliant.params import Params, clone

Loss = Callable[[Any], Tensor]  # of the network's output
Penalty = Callable[[Mapping[str, Tensor], Bound], Tensor]  # of the compact parameters


class Learner:
    """Full-size parameters, and the compact working set of the subnet in use.

    >>> import torch
    >>> from pliant.nn.elastic import elastic
    >>> from pliant.nn.learner import Learner
    >>> from pliant.nn.optimiser import Sgd
    >>> from pliant.params import params_of
    >>> from pliant.rng import stream
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    ... )
    >>> flexible = elastic(net, torch.zeros(1, 1, 8, 8))
    >>> learner = Learner(flexible, params_of(net), Sgd(lr=0.1))
    >>> for step in range(3):
    ...     learner.switch(flexible.draw(0.5, stream(0, "dropout", step)))
    ...     loss = learner.step(torch.rand(8, 1, 8, 8), lambda out: out.square().mean())
    >>> sorted(learner.params())
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    def __init__(
        self, elastic: Elastic, params: Mapping[str, Tensor], optimiser: Optimiser
    ) -> None:
        self.elastic = elastic
        self.optimiser = optimiser
        self.time = 0
        self._full = clone(params)
        self._trained = [
            name
            for name, tensor in self._full.items()
            if name not in elastic.buffers and tensor.is_floating_point()
        ]
        self._memory = [
            {name: torch.zeros_like(self._full[name]) for name in self._trained}
            for _ in range(optimiser.memories)
        ]
        first = self._full[self._trained[0]]
        self._device, self._dtype = first.device, first.dtype
        self._subnet: Subnet | None = None
        self.switch(elastic.full)

    def switch(self, subnet: Subnet) -> None:
        """Make another subnet the working set; going on with the same one costs nothing."""
        if subnet is self._subnet:
            return
        if self._subnet is not None:
            self._flush()
        self._subnet = subnet
        self._bound = self.elastic.bind(subnet, self._device, self._dtype)
        small = packing.take(self._full, self._bound.slices)
        self._leaves = [small[name].detach().requires_grad_() for name in self._trained]
        self._small = small | dict(zip(self._trained, self._leaves, strict=True))
        self._state: State = [
            list(packing.take(memory, self._bound.slices).values()) for memory in self._memory
        ]

    def step(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        loss: Loss,
        *,
        lr: float | None = None,
        penalty: Penalty | None = None,
    ) -> Tensor:
        """Train on one mini-batch and return its loss."""
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        value = loss(self.elastic.run(self._small, self._bound, *given))
        total = value if penalty is None else value + penalty(self._small, self._bound)
        found = torch.autograd.grad(total, self._leaves, allow_unused=True)
        pairs = [(n, g) for n, g in enumerate(found) if g is not None]
        self.time += 1
        with torch.no_grad():
            self.optimiser.step(
                [self._leaves[number] for number, _ in pairs],
                [grad for _, grad in pairs],
                [[memory[number] for number, _ in pairs] for memory in self._state],
                self.optimiser.lr if lr is None else lr,
                self.time,
            )
        return value.detach()

    def params(self) -> Params:
        """Return a copy of the full-size parameters and buffers as they are now."""
        self._flush()
        return clone(self._full)

    @torch.no_grad()
    def _flush(self) -> None:
        slices = self._bound.slices
        for name, small in self._small.items():
            cut = slices.get(name)
            if cut is not None and cut.rows is not None:  # a tensor kept whole is stepped in place
                packing.write(self._full[name], cut, small)
        for memory, state in zip(self._memory, self._state, strict=True):
            for name, small in zip(self._trained, state, strict=True):
                cut = slices.get(name)
                if cut is not None and cut.rows is not None:
                    packing.write(memory[name], cut, small)
