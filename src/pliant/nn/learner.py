"""Train a network with another subnet before every mini-batch, touching only what is kept."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pliant.nn.arena import Arena, Cut, Knife, Lane, lanes, parts, put_back, same_shapes, taken
from pliant.nn.elastic import Elastic
from pliant.nn.optimiser import Optimiser
from pliant.nn.subnet import Subnet
from pliant.params import Params, clone

Loss = Callable[[Any], Tensor]  # of the network's output
# What a method does to a gradient (a proximal term, a control variate): gradients and parameters
# of the subnet in use, as they lie on the shelves.
Correction = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


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
        used = {n: params[n] for n in elastic.plan.claims if params[n].is_floating_point()}
        trained = {name: tensor for name, tensor in used.items() if name in elastic.trained}
        if not trained:
            raise ValueError("Expected a network with a parameter to train, found none")
        kept = {name: tensor for name, tensor in used.items() if name not in trained}
        self._trained = Arena(elastic.plan, trained)
        self._kept = Arena(elastic.plan, kept)
        self._knife = Knife([*self._trained.shelves, *self._kept.shelves], elastic.sizes)
        packed = {*self._trained.names, *self._kept.names}
        self._others = clone({name: params[name] for name in params if name not in packed})
        self._weights = self._trained.packed(params)
        self._statistics = self._kept.packed(params)
        self._memory = [
            [torch.zeros_like(flat) for flat in self._weights] for _ in range(optimiser.memories)
        ]
        self._unread: list[int] = []
        self._subnet: Subnet | None = None
        self._cuts: list[Cut] = []
        self._kept_cuts: list[Cut] = []
        self._lanes: list[Lane] = []
        self.switch(elastic.full)

    def switch(self, subnet: Subnet) -> None:
        """Make another subnet the working set; going on with the same one costs nothing."""
        if subnet is self._subnet:
            return
        first = self._weights[0]
        bound = self.elastic.bind(subnet, first.device, first.dtype)
        cuts = self._knife.cut(bound.frame)
        self._flush()
        number, before = len(self._weights), [*self._cuts, *self._kept_cuts]
        self._subnet, self._bound = subnet, bound
        self._cuts, self._kept_cuts = cuts[:number], cuts[number:]
        self._rows = {shelf: cut.rows for shelf, cut in enumerate(cuts) if cut.rows is not None}
        if before and all(map(same_shapes, before, cuts)):
            self._refill()
        else:
            self._lay()

    @torch.no_grad()
    def _refill(self) -> None:
        """Copy the subnet into the working set of the last one, which has the same shapes."""
        for full, small, shelf in self._lanes:
            torch.index_select(full, 0, self._rows[shelf], out=small)

    def _lay(self) -> None:
        """Make a new working set."""
        shelves = self._trained.shelves
        self._small = taken(self._weights, shelves, self._cuts)
        self._state = [taken(memory, shelves, self._cuts) for memory in self._memory]
        self._seen = taken(self._statistics, self._kept.shelves, self._kept_cuts)
        self._lanes = lanes(self._statistics, self._seen, self._knife.shelves, len(shelves))
        full, small = [self._weights, *self._memory], [self._small, *self._state]
        for flats, taken_out in zip(full, small, strict=True):
            self._lanes += lanes(flats, taken_out, self._knife.shelves, 0)
        self._leaves = self._parts(self._small, self._cuts)
        buffers = self._parts(self._seen, self._kept_cuts)
        self._params = {
            **self._others,
            **dict(zip(self._trained.names, self._leaves, strict=True)),
            **dict(zip(self._kept.names, buffers, strict=True)),
        }
        for leaf in self._leaves:
            leaf.requires_grad_()

    def step(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        loss: Loss,
        *,
        lr: float | None = None,
        correct: Correction | None = None,
    ) -> Tensor:
        """Train on one mini-batch and return its loss."""
        value, grads = self.gradients(inputs, loss)
        if correct is not None:
            with torch.no_grad():
                grads = correct(grads, self._small)
        self.descend(grads, lr=lr)
        return value

    def gradients(
        self, inputs: Tensor | tuple[Tensor, ...], loss: Loss
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one mini-batch and its gradients as they lie on the shelves."""
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        value = loss(self.elastic.run(self._params, self._bound, *given))
        found = torch.autograd.grad(value, self._leaves, allow_unused=True)
        self._unread = [number for number, grad in enumerate(found) if grad is None]
        return value.detach(), self._gathered(found)

    @torch.no_grad()
    def descend(self, grads: list[Tensor], *, lr: float | None = None) -> None:
        """Let the optimiser move the subnet in use by these gradients."""
        self.time += 1
        rate = self.optimiser.lr if lr is None else lr
        with self._spared(self._unread):
            self.optimiser.step(self._small, grads, self._state, rate, self.time)

    def laid(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Lay values for all that is trained (an anchor, a control variate) on shelves."""
        return self._trained.packed(params)

    def part(self, flats: list[Tensor]) -> list[Tensor]:
        """Return the part of full shelves that belongs to the subnet in use."""
        return taken(flats, self._trained.shelves, self._cuts)

    def spread(self, smalls: list[Tensor]) -> list[Tensor]:
        """Lay the part of the subnet in use on full shelves, zeros elsewhere."""
        flats = [torch.zeros_like(flat) for flat in self._weights]
        put_back(flats, smalls, self._trained.shelves, self._cuts)
        return [
            small if cut.rows is None else flat
            for flat, small, cut in zip(flats, smalls, self._cuts, strict=True)
        ]

    def params(self) -> Params:
        """Return a copy of the full-size parameters and buffers as they are now."""
        self._flush()
        weights = self._trained.unpacked(self._weights)
        statistics = self._kept.unpacked(self._statistics)
        return clone({**self._others, **weights, **statistics})

    def _parts(self, flats: list[Tensor], cuts: list[Cut]) -> list[Tensor]:
        return [
            part
            for flat, cut in zip(flats, cuts, strict=True)
            for part in parts(flat.detach(), cut.shapes)
        ]

    @contextmanager
    def _spared(self, unread: list[int]) -> Iterator[None]:
        """Leave parameters that the loss does not read as they are: neither decayed nor moved."""
        if not unread:
            yield
            return
        everything = [self._leaves, *(self._parts(flats, self._cuts) for flats in self._state)]
        before = [(rows[number], rows[number].clone()) for rows in everything for number in unread]
        yield
        for tensor, value in before:
            tensor.detach().copy_(value)

    def _gathered(self, grads: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Lay gradients end to end as the parameters lie."""
        found, start = [], 0
        for cut in self._cuts:
            stop = start + len(cut.shapes)
            flat = [
                leaf.new_zeros(leaf.numel()) if grad is None else grad.reshape(-1)
                for leaf, grad in zip(self._leaves[start:stop], grads[start:stop], strict=True)
            ]
            found.append(flat[0] if len(flat) == 1 else torch.cat(flat))
            start = stop
        return found

    @torch.no_grad()
    def _flush(self) -> None:
        for full, small, shelf in self._lanes:
            full.index_copy_(0, self._rows[shelf], small)
