"""Train an elastic network on a different subnet per mini-batch, updating only its entries."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pliant.nn.compiler.program import ChannelIndex
from pliant.nn.elastic import Elastic
from pliant.nn.flat_params import (
    BufferSlice,
    CopyPair,
    FlatLayout,
    SubnetIndexer,
    gather_rows,
    make_copy_pairs,
    split_flat,
)
from pliant.nn.optimisers import Optimiser
from pliant.nn.subnet import Subnet
from pliant.params import Params, clone

LossFn = Callable[[Any], Tensor]  # of the network's output
# a method's change to the gradients (a proximal term, a control variate): takes the flat gradients
# and parameters of the current subnet
Correction = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


class SubnetTrainer:
    """Full-size parameters, and the compact working set of the current subnet.

    >>> import torch
    >>> from pliant.nn.elastic import elastic
    >>> from pliant.nn.trainer import SubnetTrainer
    >>> from pliant.nn.optimisers import Sgd
    >>> from pliant.params import get_params
    >>> from pliant.rng import rng_stream
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    ... )
    >>> flexible = elastic(net, torch.zeros(1, 1, 8, 8))
    >>> trainer = SubnetTrainer(flexible, get_params(net), Sgd(lr=0.1))
    >>> for step in range(3):
    ...     trainer.switch(flexible.draw(0.5, rng_stream(0, "dropout", step)))
    ...     loss = trainer.step(torch.rand(8, 1, 8, 8), lambda out: out.square().mean())
    >>> sorted(trainer.params())
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    def __init__(
        self, elastic: Elastic, params: Mapping[str, Tensor], optimiser: Optimiser
    ) -> None:
        self.elastic = elastic
        self.optimiser = optimiser
        self.step_count = 0
        used = {n: params[n] for n in elastic.program.slicings if params[n].is_floating_point()}
        trainable = {n: tensor for n, tensor in used.items() if n in elastic.trainable_names}
        if not trainable:
            raise ValueError("Expected a network with a trainable parameter, got none")
        buffers = {name: tensor for name, tensor in used.items() if name not in trainable}
        self._param_layout = FlatLayout(elastic.program, trainable)
        self._buffer_layout = FlatLayout(elastic.program, buffers)
        self._indexer = SubnetIndexer(
            [*self._param_layout.flat_buffers, *self._buffer_layout.flat_buffers], elastic.sizes
        )
        packed = {*self._param_layout.names, *self._buffer_layout.names}
        self._other_tensors = clone({name: params[name] for name in params if name not in packed})
        self._param_flats = self._param_layout.pack(params)
        self._buffer_flats = self._buffer_layout.pack(params)
        self._state_flats = [
            [torch.zeros_like(flat) for flat in self._param_flats]
            for _ in range(optimiser.num_state_tensors)
        ]
        self._unused_leaves: list[int] = []
        self._frozen: frozenset[str] = frozenset()
        self._subnet: Subnet | None = None
        self._net = elastic  # at the current size
        self._slices: list[BufferSlice] = []
        self._copy_pairs: list[CopyPair] = []
        self.switch(elastic.full)

    def switch(self, subnet: Subnet, size: Sequence[int] = ()) -> None:
        """Make a subnet current, for inputs of a spatial size (none: the network's own).

        Nothing happens if both already are; another size alone leaves the working set as it is.
        """
        net = self.elastic.at(*size) if size else self.elastic
        if subnet is self._subnet and net is self._net:
            return
        sample = self._param_flats[0]
        bound = net.bind(subnet, sample.device, sample.dtype)
        if subnet is not self._subnet:
            self._load_subnet(subnet, bound.channel_index)
        self._net, self._bound = net, bound

    def freeze(self, names: frozenset[str]) -> None:
        """Leave these parameters as they are from now on, and save what their gradients cost."""
        self._frozen = names
        self._mark_leaves()

    def _mark_leaves(self) -> None:
        for name, leaf in zip(self._param_layout.names, self._leaves, strict=True):
            leaf.requires_grad_(name not in self._frozen)

    def _load_subnet(self, subnet: Subnet, channel_index: ChannelIndex) -> None:
        """Write the working set back, and copy the subnet into it."""
        slices = self._indexer.index_subnet(channel_index)
        self._flush()
        previous = self._slices
        self._subnet, self._slices = subnet, slices
        num_params = len(self._param_flats)
        self._param_slices, self._buffer_slices = slices[:num_params], slices[num_params:]
        if previous and all(a.shapes is b.shapes for a, b in zip(previous, slices, strict=True)):
            self._refill()
        else:
            self._allocate()

    @torch.no_grad()
    def _refill(self) -> None:
        """Copy the subnet into the previous working set, which has the same shapes."""
        for full_rows, subnet_rows, index in self._copy_pairs:
            torch.index_select(full_rows, 0, self._select_rows(index), out=subnet_rows)

    def _allocate(self) -> None:
        params, buffers = self._param_slices, self._buffer_slices
        self._subnet_param_flats = gather_rows(self._param_flats, params)
        self._subnet_state_flats = [gather_rows(flats, params) for flats in self._state_flats]
        subnet_buffer_flats = gather_rows(self._buffer_flats, buffers)
        self._copy_pairs = make_copy_pairs(self._param_flats, self._subnet_param_flats, params)
        for flats, subnet_flats in zip(self._state_flats, self._subnet_state_flats, strict=True):
            self._copy_pairs += make_copy_pairs(flats, subnet_flats, params)
        self._copy_pairs += make_copy_pairs(
            self._buffer_flats, subnet_buffer_flats, buffers, len(params)
        )
        self._leaves = self._split_flats(self._subnet_param_flats, self._param_slices)
        statistics = self._split_flats(subnet_buffer_flats, self._buffer_slices)
        self._subnet_params = {
            **self._other_tensors,
            **dict(zip(self._param_layout.names, self._leaves, strict=True)),
            **dict(zip(self._buffer_layout.names, statistics, strict=True)),
        }
        self._mark_leaves()

    def step(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        loss: LossFn,
        *,
        lr: float | None = None,
        correction: Correction | None = None,
    ) -> Tensor:
        """Train on one mini-batch and return its loss."""
        loss_value, grads = self.compute_gradients(inputs, loss)
        if correction is not None:
            with torch.no_grad():
                grads = correction(grads, self._subnet_param_flats)
        self.apply_gradients(grads, lr=lr)
        return loss_value

    def compute_gradients(
        self, inputs: Tensor | tuple[Tensor, ...], loss: LossFn
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one mini-batch and its flat gradients."""
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        loss_value = loss(self.elastic.run(self._subnet_params, self._bound, *args))
        grads = self._differentiate(loss_value)
        self._unused_leaves = [index for index, grad in enumerate(grads) if grad is None]
        return loss_value.detach(), self._flatten_grads(grads)

    def _differentiate(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        if not self._frozen:
            return torch.autograd.grad(loss, self._leaves, allow_unused=True)
        trained = [leaf for leaf in self._leaves if leaf.requires_grad]
        grads = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        return tuple(next(grads) if leaf.requires_grad else None for leaf in self._leaves)

    @torch.no_grad()
    def apply_gradients(self, grads: list[Tensor], *, lr: float | None = None) -> None:
        """Step the optimiser on the current subnet with these gradients."""
        self.step_count += 1
        step_lr = self.optimiser.lr if lr is None else lr
        with self._preserve_unused(self._unused_leaves):
            self.optimiser.step(
                self._subnet_param_flats, grads, self._subnet_state_flats, step_lr, self.step_count
            )

    def flatten_params(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Flatten values of all trainable parameters (an anchor, a control variate)."""
        return self._param_layout.pack(params)

    def unflatten_params(self, flats: list[Tensor]) -> Params:
        """Return flat values of all trainable parameters by name."""
        return clone(self._param_layout.unpack(flats))

    def gather_subnet(self, flats: list[Tensor]) -> list[Tensor]:
        """Return the current subnet's part of full-size flat buffers."""
        return gather_rows(flats, self._param_slices)

    def scatter_subnet(self, subnet_flats: list[Tensor]) -> list[Tensor]:
        """Return the current subnet's flat values at full size, padded with zeros."""
        flats = []
        for full, flat, part in zip(
            self._param_flats, subnet_flats, self._param_slices, strict=True
        ):
            if part.rows is None:
                flats.append(flat)
            else:
                rows = torch.zeros_like(full).view(-1, part.block)
                rows.index_copy_(0, part.rows, flat.view(-1, part.block))
                flats.append(rows.view(-1))
        return flats

    def params(self) -> Params:
        """Return a copy of the full-size parameters and buffers."""
        self._flush()
        weights = self._param_layout.unpack(self._param_flats)
        statistics = self._buffer_layout.unpack(self._buffer_flats)
        return clone({**self._other_tensors, **weights, **statistics})

    def _split_flats(self, flats: list[Tensor], slices: list[BufferSlice]) -> list[Tensor]:
        return [
            part
            for flat, buffer_slice in zip(flats, slices, strict=True)
            for part in split_flat(flat.detach(), buffer_slice.shapes)
        ]

    @contextmanager
    def _preserve_unused(self, unused: list[int]) -> Iterator[None]:
        """Restore parameters without a gradient, so that they are neither moved nor decayed."""
        if not unused:
            yield
            return
        groups = [
            self._leaves,
            *(self._split_flats(flats, self._param_slices) for flats in self._subnet_state_flats),
        ]
        saved = [(group[index], group[index].clone()) for group in groups for index in unused]
        yield
        for tensor, value in saved:
            tensor.detach().copy_(value)

    def _flatten_grads(self, grads: tuple[Tensor | None, ...]) -> list[Tensor]:
        flats, start = [], 0
        for buffer_slice in self._param_slices:
            stop = start + len(buffer_slice.shapes)
            parts = [
                leaf.new_zeros(leaf.numel()) if grad is None else grad.reshape(-1)
                for leaf, grad in zip(self._leaves[start:stop], grads[start:stop], strict=True)
            ]
            flats.append(parts[0] if len(parts) == 1 else torch.cat(parts))
            start = stop
        return flats

    @torch.no_grad()
    def _flush(self) -> None:
        for full_rows, subnet_rows, index in self._copy_pairs:
            full_rows.index_copy_(0, self._select_rows(index), subnet_rows)

    def _select_rows(self, index: int) -> Tensor:
        rows = self._slices[index].rows
        assert rows is not None
        return rows
