"""Any network, trained narrower at its real cost: sites, draws, costs, the compact pass.

Rapp et al., "DISTREAL: Distributed Resource-Aware Learning in Heterogeneous Systems", AAAI 2022.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pliant.nn import channels, cost, packing, rules
from pliant.nn import subnet as choices
from pliant.nn.decisions import Decisions
from pliant.nn.lower import Builder
from pliant.nn.plan import Bound, Density, Plan, bind, execute, referring
from pliant.nn.subnet import Choice, Order, Subnet
from pliant.nn.trace import trace
from pliant.params import Params

Rates = float | Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Site:
    """Layers whose filters are drawn together."""

    layers: tuple[str, ...]
    filters: int
    macs: int  # of these layers in the full network, per sample, forward
    feeds: tuple[str, ...]  # layers that read what these write


class Elastic:
    """A network whose filters can be dropped anew before every mini-batch.

    >>> import torch
    >>> from pliant.nn.elastic import elastic
    >>> from pliant.params import params_of
    >>> from pliant.rng import stream
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 2)
    ... )
    >>> flexible = elastic(net, torch.zeros(1, 1, 8, 8))
    >>> [(site.layers, site.filters) for site in flexible.sites]
    [(('0',), 8)]
    >>> flexible.macs(0.0), flexible.macs(0.5)
    (3168.0, 1585.546875)
    >>> subnet = flexible.draw(0.5, stream(0, "dropout"))
    >>> small = flexible.take(params_of(net), subnet)
    >>> flexible.run(small, subnet, torch.zeros(4, 1, 8, 8)).shape
    torch.Size([4, 2])
    """

    def __init__(self, net: nn.Module, plan: Plan, builder: Builder) -> None:
        self.net = net
        self.plan = plan
        self.groups = builder.groups
        self.sizes = tuple(group.filters for group in builder.groups)
        self.sites = tuple(self._site(number) for number in range(len(self.groups)))
        self.fingerprint = _fingerprint(plan, self.sites)
        everything = tuple(np.ones(size, np.bool_) for size in self.sizes)
        self.full = Subnet(self.fingerprint, everything, (1.0,) * len(self.sizes))
        self._last: tuple[Any, NDArray[np.float64], tuple[float, ...]] = (None, np.zeros(0), ())
        self.buffers = frozenset(name for name, _ in net.named_buffers())
        self.trained = frozenset(n for n, tensor in net.named_parameters() if tensor.requires_grad)

    # choosing

    def rates(self, rates: Rates) -> NDArray[np.float64]:
        """Return one checked rate per site, from one number for all or one for each."""
        given = np.asarray(rates, np.float64)
        if given.ndim == 0:
            given = np.full(len(self.sites), float(given))
        if given.shape != (len(self.sites),):
            raise ValueError(
                f"Expected {len(self.sites)} rates, one for each site, got {given.size}"
            )
        wrong = ~((given >= 0) & (given < 1))  # a NaN is neither
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"Expected rates in [0, 1), got {given[place]} for site {place} "
                f"({', '.join(self.sites[place].layers)})"
            )
        return given

    def draw(self, rates: Rates, rng: np.random.Generator, choice: Choice = "bernoulli") -> Subnet:
        """Draw filters at random: a coin for each, or a rounded number of them."""
        keep, scales = self._keep(rates)
        choices.check(choice)
        if not scales:
            return self.full
        if choice == "bernoulli":
            masks = choices.coins(self.sizes, keep, rng)
        else:
            counts = choices.rounded(self.sizes, keep, choice, rng)
            masks = choices.drawn(self.sizes, counts, rng)
        return self._subnet(masks, scales)

    def _keep(self, rates: Rates) -> tuple[NDArray[np.float64], tuple[float, ...]]:
        """Return shares to keep and factors, none where all is kept; remember the last rates."""
        given = np.asarray(rates, np.float64)
        key = given.shape, given.tobytes()
        last = self._last
        if key != last[0]:
            keep = 1 - self.rates(given)
            scales = () if (keep == 1).all() else tuple((1 / keep).tolist())
            last = self._last = key, keep, scales
        return last[1:]

    def first(self, rates: Rates, order: Order | None = None, *, scaled: bool = False) -> Subnet:
        """Keep the first filters of an order (their own, unless one is given), rounded up."""
        keep = 1 - self.rates(rates)
        if order is not None and tuple(map(len, order)) != self.sizes:
            raise ValueError(
                f"Expected an order of {_short(self.sizes)} filters, got one of "
                f"{_short(tuple(map(len, order)))}"
            )
        order = order if order is not None else choices.rolled(self.sizes, 0)
        counts = choices.ceiled(self.sizes, keep)
        sizes = zip(self.sizes, counts, strict=True)
        scales = [size / number if scaled else 1.0 for size, number in sizes]
        return self._subnet(choices.first(counts, order), tuple(scales))

    def order(self, rng: np.random.Generator) -> Order:
        """Draw a random order of every site's filters, to keep for a while."""
        return choices.orders(self.sizes, rng)

    def rolled(self, shift: int) -> Order:
        """Return the order of a window that begins at filter `shift` and goes round."""
        return choices.rolled(self.sizes, shift)

    def _subnet(self, masks: list[NDArray[np.bool_]], scales: tuple[float, ...]) -> Subnet:
        for pieces in self.plan.fragile:
            channels.mend(pieces, masks)
        return Subnet(self.fingerprint, tuple(masks), scales)

    # costs, per sample

    def macs(
        self, of: Rates | Subnet, *, training: bool = False, choice: Choice = "bernoulli"
    ) -> float:
        """Return MACs per sample: expected at rates, or realised for a subnet."""
        if isinstance(of, Subnet):
            self.check(of)
            return float(cost.realised_macs(self.plan.works, of, training=training))
        choices.check(choice)
        at = cost.Expectation(self.groups, 1 - self.rates(of), choice)
        return float(cost.expected_macs(self.plan.works, at, training=training))

    def activations(self, of: Rates | Subnet) -> float:
        """Return how many numbers per sample the forward pass writes."""
        if isinstance(of, Subnet):
            self.check(of)
            return float(cost.activations(self.plan, of))
        at = cost.Expectation(self.groups, 1 - self.rates(of), "bernoulli")
        return cost.expected_activations(self.plan, at)

    def parameters(self, subnet: Subnet) -> int:
        """Return how many numbers a subnet's parameters and buffers hold."""
        self.check(subnet)
        return cost.parameters(self.plan, subnet)

    # running

    def bind(
        self,
        subnet: Subnet,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Bound:
        """Work out once what a subnet means for parameters and pass; it can then run often."""
        self.check(subnet)
        return bind(self.plan, subnet, device or torch.device("cpu"), dtype)

    def take(self, params: Mapping[str, Tensor], subnet: Subnet | Bound) -> Params:
        """Copy a subnet's parameters and buffers out of full-size ones."""
        bound = subnet if isinstance(subnet, Bound) else self.bind(subnet, *_home(params))
        small = packing.take(params, bound.slices)
        return {
            name: tensor.detach().clone() if tensor is params[name] else tensor
            for name, tensor in small.items()
        }

    def put(
        self, params: Mapping[str, Tensor], small: Mapping[str, Tensor], subnet: Subnet | Bound
    ) -> Params:
        """Return full-size parameters that have the subnet's entries in their places."""
        bound = subnet if isinstance(subnet, Bound) else self.bind(subnet, *_home(params))
        return packing.put(params, small, bound.slices)

    def embed(
        self, params: Mapping[str, Tensor], small: Mapping[str, Tensor], subnet: Subnet | Bound
    ) -> tuple[Params, Params]:
        """Return a subnet's entries (or their change) among zeros, and ones where they are."""
        bound = subnet if isinstance(subnet, Bound) else self.bind(subnet, *_home(params))
        return packing.embed(params, small, bound.slices)

    def run(self, small: Mapping[str, Tensor], subnet: Subnet | Bound, *inputs: Tensor) -> Any:
        """Run the compact training pass on compact parameters.

        Running statistics among `small` are updated in place; everything else is left alone.
        """
        bound = subnet if isinstance(subnet, Bound) else self.bind(subnet, *_home(small))
        return execute(self.plan, bound, small, inputs)

    def check(self, subnet: Subnet) -> None:
        """Refuse a subnet of another network."""
        if subnet.network != self.fingerprint:
            sizes = tuple(len(mask) for mask in subnet.masks)
            raise ValueError(
                f"Expected a subnet of this network ({len(self.sizes)} sites of "
                f"{_short(self.sizes)} filters), got one of another ({len(sizes)} sites of "
                f"{_short(sizes)} filters)"
            )

    # telling

    def kept(self, subnet: Subnet) -> dict[str, tuple[int, NDArray[np.bool_], float]]:
        """Return for each drawn layer its site, its kept filters and their factor."""
        self.check(subnet)
        return {
            layer: (number, subnet.masks[number], subnet.scales[number])
            for number, site in enumerate(self.sites)
            for layer in site.layers
        }

    @property
    def densities(self) -> tuple[Density, ...]:
        """Return where absent channels are filled with zeros, and why."""
        return tuple(self.plan.densities)

    def explain(self) -> str:
        """Return a table of sites, costs at three rates, and where density was needed."""
        head = f"{'site':>4}  {'filters':>7}  {'MACs':>12}  layers (read by)"
        rows = [
            f"{number:>4}  {site.filters:>7}  {site.macs:>12,}  {', '.join(site.layers)}"
            f" ({', '.join(site.feeds)})"
            for number, site in enumerate(self.sites)
        ]
        full = self.macs(0.0) or 1.0
        totals = [
            f"MACs per sample at rate {rate}: {self.macs(rate):,.0f} ({self.macs(rate) / full:.3f})"
            for rate in (0.0, 0.25, 0.5)
        ]
        dense = [f"dense: {d.value} for {d.reader}: {d.why}" for d in self.densities]
        return "\n".join([head, *rows, *totals, *(dense or ["no value had to be made dense"])])

    def _site(self, number: int) -> Site:
        layers = self.groups[number].layers
        own = [work for work in self.plan.works if work.layer in layers]
        feeds = [
            _layer(work.layer)
            for work in self.plan.works
            if any(number in channels.sites_of(piece.expression) for piece in work.inputs or ())
        ]
        macs = sum(
            work.each
            * channels.width(work.outputs)
            * (channels.width(work.inputs) if work.inputs else 1)
            for work in own
        )
        names = tuple(_layer(layer) for layer in layers)
        return Site(names, self.groups[number].filters, macs, tuple(dict.fromkeys(feeds)))


def elastic(
    net: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    *,
    coupled: bool = True,
    hidden: bool = False,
) -> Elastic:
    """Make any traceable network elastic, with no change to its code.

    `coupled` draws layers whose outputs are added or multiplied together; `hidden` makes sites of
    hidden linear layers too.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> [site.filters for site in net.sites]
    [12, 24]
    >>> round(net.macs(0.5) / net.macs(0.0), 2)
    0.33
    """
    graph = trace(net, example)
    decisions = Decisions(coupled)
    able = rules.candidates(Builder(net, {}, decisions), graph)
    while True:
        before = decisions.size()
        builder = Builder(net, able, decisions)
        plan = _laid_out(builder, graph)
        if decisions.size() == before and not hidden:
            for group in builder.groups:  # a linear layer is drawn only beside a convolution
                if all(len(builder.shape(layer)) == 2 for layer in group.layers):
                    decisions.fixed.update(group.layers)
        if decisions.size() == before:
            return Elastic(net, plan, builder)


def _laid_out(builder: Builder, graph: Any) -> Plan:
    output: Any = None
    for node in graph.nodes:
        if node.op != "output":
            rules.lay_out(builder, node)
            continue
        for read in node.all_input_nodes:
            layout = builder.layout(read)
            if layout is not None:
                builder.fix(layout.pieces)
        output = referring(
            node.args[0], lambda read: builder.dense(read, "output", "it is the output")
        )
    return builder.finish(output)


def _home(params: Mapping[str, Tensor]) -> tuple[torch.device, torch.dtype]:
    for tensor in params.values():
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.float32


def _layer(weight: str) -> str:
    return weight.removesuffix(".weight")


def _short(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:6]))
    return f"{shown}, …" if len(sizes) > 6 else shown


def _fingerprint(plan: Plan, sites: Sequence[Site]) -> str:
    parts = [f"{name}:{shape}" for name, shape in sorted(plan.shapes.items())]
    parts += [f"{site.layers}:{site.filters}" for site in sites]
    parts += [f"{work.layer}:{work.each}" for work in plan.works]
    return sha256("|".join(parts).encode()).hexdigest()[:16]
