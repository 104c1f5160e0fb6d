"""Elastic networks: drop filters of any traceable network and save their full cost.

Rapp et al., "DISTREAL: Distributed Resource-Aware Learning in Heterogeneous Systems", AAAI 2022.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pliant.html_table import make_html_table
from pliant.nn import slicing
from pliant.nn import subnet as subnets
from pliant.nn.check_key import PASSED, has_passed, make_check_key, remember_pass
from pliant.nn.compiler import channels
from pliant.nn.compiler.compile import (
    CompiledNetwork,
    compile_network,
    make_blank,
    recompile_network,
)
from pliant.nn.compiler.preserve import preserve, switch_to_training
from pliant.nn.compiler.program import (
    BoundProgram,
    ChannelIndex,
    DenseFallback,
    execute,
    format_shape,
)
from pliant.nn.compiler.refusals import check_example
from pliant.nn.compiler.trace import TRACE_LOCK, trace
from pliant.nn.cost import ExpectedCounts, SubnetCounts
from pliant.nn.self_check import check_elastic
from pliant.nn.sites import compute_fingerprint, describe_sites, format_sizes, format_summary
from pliant.nn.subnet import FilterOrders, Sampling, Subnet
from pliant.params import Params, find_device

Rates = float | Sequence[float] | NDArray[np.float64]
Tensors = Mapping[str, Tensor]
MAX_CACHED_SIZES = 8  # per network


class Elastic:
    """A network that trains a different subset of its filters in every mini-batch.

    >>> import torch
    >>> from pliant.nn.elastic import elastic
    >>> from pliant.params import get_params
    >>> from pliant.rng import rng_stream
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 2)
    ... )
    >>> flexible = elastic(net, torch.zeros(1, 1, 8, 8))
    >>> [(site.layers, site.filters) for site in flexible.sites]
    [(('0',), 8)]
    >>> flexible.macs(0.0), flexible.macs(0.5)
    (3168.0, 1584.0)
    >>> subnet = flexible.draw(0.5, rng_stream(0, "dropout"))
    >>> subnet_params = flexible.take(get_params(net), subnet)
    >>> flexible.run(subnet_params, subnet, torch.zeros(4, 1, 8, 8)).shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        net: nn.Module,
        compiled: CompiledNetwork,
        example: tuple[Tensor, ...],
        original: "Elastic | None" = None,
    ) -> None:
        self.module = net
        self.program = compiled.program
        self.groups = compiled.groups
        self.sizes = tuple(group.filters for group in self.groups)
        self.sites = describe_sites(self.groups, self.program)
        self.full_layers: Mapping[str, str] = compiled.full_layers  # not in a site, and why
        self._compiled, self._example, self._original = compiled, example, original
        self._resized: dict[tuple[int, ...], Elastic] = {}  # by spatial size, latest last
        if original is None:
            self.fingerprint = compute_fingerprint(self.program, self.sites)
            masks = subnets.make_full_masks(self.sizes)
            self.full = Subnet(self.fingerprint, masks, (1.0,) * len(self.sizes))
        else:
            self.fingerprint, self.full = original.fingerprint, original.full
        empty = np.zeros(0)
        self._rates_cache: tuple[Any, NDArray[np.float64], tuple[float, ...]] = (None, empty, ())
        self.caches: defaultdict[Any, dict[Any, Any]] = defaultdict(dict)  # of `cache_on_net`
        self.buffer_names = frozenset(name for name, _ in net.named_buffers())
        self.trainable_names = frozenset(
            name for name, tensor in net.named_parameters() if tensor.requires_grad
        )

    def at(self, *size: int) -> "Elastic":
        """Return this network for inputs of another spatial size, like `net.at(height, width)`.

        It has the same parameters, sites, fingerprint and subnets. Only inputs as large as the
        first one are resized.

        >>> import torch
        >>> import pliant as pl
        >>> net = pl.elastic(pl.models.resnet20(), torch.zeros(1, 3, 32, 32))
        >>> small = net.at(16, 16)
        >>> subnet = net.draw(0.5, pl.rng_stream(0, "dropout"))
        >>> round(small.macs(subnet) / net.macs(subnet), 3)
        0.25
        """
        original = self._original or self
        own_size = original._find_size()
        if len(size) != len(own_size) or min(size, default=1) < 1:
            raise ValueError(
                f"Expected {len(own_size)} positive sizes, as the example given to pliant.elastic "
                f"has {format_shape(own_size)}, got {format_shape(size)}"
            )
        if size == own_size:
            return original
        net = original._resized.pop(size, None) or original._compile_at(size)
        if len(original._resized) >= MAX_CACHED_SIZES:
            del original._resized[next(iter(original._resized))]
        original._resized[size] = net
        return net

    def _find_size(self) -> tuple[int, ...]:
        """Return the spatial size of the first input that has one."""
        return next((tuple(x.shape[2:]) for x in self._example if x.dim() > 2), ())

    def _compile_at(self, size: tuple[int, ...]) -> "Elastic":
        own_size = self._find_size()
        example = tuple(
            make_blank(x, (x.shape[1], *size)) if x.shape[2:] == own_size else x
            for x in self._example
        )
        compiled = recompile_network(self.module, example, self._compiled, format_shape(size))
        return Elastic(self.module, compiled, example, self)

    # subnets

    def expand_rates(self, rates: Rates) -> NDArray[np.float64]:
        """Check rates, and return one per site."""
        expanded, count = np.asarray(rates, np.float64), len(self.sites)
        if expanded.ndim == 0:
            expanded = np.full(count, float(expanded))
        if expanded.shape != (count,):
            raise ValueError(f"Expected {count} rates, one for each site, got {expanded.size}")
        is_invalid = ~((expanded >= 0) & (expanded < 1))  # also true for NaN
        if is_invalid.any():
            site = int(np.flatnonzero(is_invalid)[0])
            raise ValueError(
                f"Expected rates in [0, 1), got {expanded[site]} for site {site} "
                f"({', '.join(self.sites[site].layers)})"
            )
        return expanded

    def draw(self, rates: Rates, rng: np.random.Generator, sampling: Sampling = "blocks") -> Subnet:
        """Sample a number of filters rounded at random, or each one independently."""
        keep, scales = self._resolve_rates(rates)
        subnets.check_sampling(sampling)
        if not scales:
            return self.full
        if sampling == "bernoulli":
            masks = subnets.sample_bernoulli_masks(self.sizes, keep, rng)
        else:
            counts = subnets.round_randomly(self.sizes, keep, sampling, rng)
            masks = subnets.sample_uniform_masks(self.sizes, counts, rng)
        return self._make_subnet(masks, scales)

    def _resolve_rates(self, rates: Rates) -> tuple[NDArray[np.float64], tuple[float, ...]]:
        """Return keep probabilities and scales (none if all is kept), caching the last rates."""
        array = np.asarray(rates, np.float64)
        key = array.shape, array.tobytes()
        cached = self._rates_cache
        if key != cached[0]:
            keep = 1 - self.expand_rates(array)
            scales = () if (keep == 1).all() else tuple((1 / keep).tolist())
            cached = self._rates_cache = key, keep, scales
        return cached[1:]

    def select_prefix(
        self, rates: Rates, orders: FilterOrders | None = None, *, rescale: bool = False
    ) -> Subnet:
        """Keep the first filters of an order (by default their own), rounded up."""
        keep = 1 - self.expand_rates(rates)
        if orders is not None and tuple(map(len, orders)) != self.sizes:
            raise ValueError(
                f"Expected an order of {format_sizes(self.sizes)} filters, got one of "
                f"{format_sizes(tuple(map(len, orders)))}"
            )
        orders = orders if orders is not None else subnets.make_rolling_orders(self.sizes, 0)
        counts = subnets.round_up(self.sizes, keep)
        sizes = zip(self.sizes, counts, strict=True)
        scales = [size / count if rescale else 1.0 for size, count in sizes]
        return self._make_subnet(subnets.make_prefix_masks(counts, orders), tuple(scales))

    def sample_orders(self, rng: np.random.Generator) -> FilterOrders:
        """Draw a random order of each site's filters."""
        return subnets.sample_orders(self.sizes, rng)

    def make_rolling_orders(self, shift: int) -> FilterOrders:
        """Return the orders that start at filter `shift` and wrap around."""
        return subnets.make_rolling_orders(self.sizes, shift)

    def _make_subnet(self, masks: list[NDArray[np.bool_]], scales: tuple[float, ...]) -> Subnet:
        for spans in self.program.fragile_spans:
            channels.restore_one(spans, masks)
        return Subnet(self.fingerprint, tuple(masks), scales)

    # costs, per sample

    def macs(
        self,
        rates_or_subnet: Rates | Subnet,
        *,
        training: bool = False,
        sampling: Sampling = "blocks",
    ) -> float:
        """Return MACs per sample, in expectation for rates or exactly for a subnet."""
        counts, total = self._make_counts(rates_or_subnet, sampling), 0.0
        for cost in self.program.layer_costs:
            macs = cost.unit_macs * counts.count_pairs(cost.outputs, cost.inputs)
            total += macs * (cost.passes if training else 1)
        return total

    def count_activations(
        self, rates_or_subnet: Rates | Subnet, *, sampling: Sampling = "blocks"
    ) -> float:
        """Return the number of activations per sample that the forward pass writes."""
        counts = self._make_counts(rates_or_subnet, sampling)
        tensors = self.program.activations
        return float(sum(tensor.unit_size * counts.count(tensor.spans) for tensor in tensors))

    def count_params(self, subnet: Subnet) -> int:
        """Return the number of entries in a subnet's parameters and buffers."""
        return sum(self.count_entries(subnet).values())

    def count_bytes(self, params: Tensors, subnet: Subnet) -> int:
        """Return the bytes of the subnet's part of these full-size parameters and buffers."""
        counts = self.count_entries(subnet)
        return sum(
            counts.get(name, tensor.numel()) * tensor.element_size()
            for name, tensor in params.items()
        )

    def count_entries(self, subnet: Subnet) -> dict[str, int]:
        """Return the number of entries in each of a subnet's parameters and buffers."""
        return {name: prod(shape) for name, shape in self.compute_shapes(subnet).items()}

    def compute_shapes(self, subnet: Subnet) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a subnet's parameters and buffers."""
        self.check_subnet(subnet)
        return slicing.compute_shapes(self.program, subnet)

    def _make_counts(
        self, rates_or_subnet: Rates | Subnet, sampling: Sampling
    ) -> ExpectedCounts | SubnetCounts:
        if isinstance(rates_or_subnet, Subnet):
            self.check_subnet(rates_or_subnet)
            return SubnetCounts(rates_or_subnet)
        subnets.check_sampling(sampling)
        keep = 1 - self.expand_rates(rates_or_subnet)
        return ExpectedCounts(self.sizes, keep, sampling)

    # running

    def bind(
        self, subnet: Subnet, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> BoundProgram:
        """Compute the slices and indices of a subnet once, to run it many times."""
        self.check_subnet(subnet)
        index = ChannelIndex(subnet, device or torch.device("cpu"), dtype)
        return BoundProgram(self.program, index)

    def take(self, params: Tensors, subnet: Subnet | BoundProgram) -> Params:
        """Copy a subnet's parameters and buffers out of the full-size ones."""
        return slicing.take(params, self._bind_like(subnet, params).slices)

    def put(self, params: Tensors, subnet_params: Tensors, subnet: Subnet | BoundProgram) -> Params:
        """Return full-size parameters with the subnet's entries overwritten."""
        return slicing.put(params, subnet_params, self._bind_like(subnet, params).slices)

    def expand(
        self, params: Tensors, subnet_params: Tensors, subnet: Subnet | BoundProgram
    ) -> Params:
        """Return a subnet's entries at the full size of `params`, padded with zeros."""
        return slicing.expand(params, subnet_params, self._bind_like(subnet, params).slices)

    def embed(
        self, params: Tensors, subnet_params: Tensors, subnet: Subnet | BoundProgram
    ) -> tuple[Params, Params]:
        """Return a subnet's entries at full size, padded with zeros, and a mask of ones."""
        return slicing.embed(params, subnet_params, self._bind_like(subnet, params).slices)

    def run(self, subnet_params: Tensors, subnet: Subnet | BoundProgram, *inputs: Tensor) -> Any:
        """Run the compact training pass, updating running statistics in place."""
        return execute(self._bind_like(subnet, subnet_params), subnet_params, inputs)

    def _bind_like(self, subnet: Subnet | BoundProgram, params: Tensors) -> BoundProgram:
        if isinstance(subnet, BoundProgram):
            return subnet
        for tensor in params.values():
            if tensor.is_floating_point():
                return self.bind(subnet, tensor.device, tensor.dtype)
        return self.bind(subnet)

    def check_subnet(self, subnet: Subnet) -> None:
        """Raise if the subnet belongs to another network."""
        if subnet.network != self.fingerprint:
            sizes = tuple(len(mask) for mask in subnet.masks)
            raise ValueError(
                f"Expected a subnet of this network ({len(self.sizes)} sites of "
                f"{format_sizes(self.sizes)} filters), got one of another ({len(sizes)} sites of "
                f"{format_sizes(sizes)} filters)"
            )

    # inspection

    @property
    def dense_fallbacks(self) -> tuple[DenseFallback, ...]:
        """Return where absent channels are filled with zeros, and why."""
        return tuple(self.program.dense_fallbacks)

    def __repr__(self) -> str:
        name = type(self.module).__name__
        return f"Elastic({name}: {len(self.sites)} sites, {self.macs(0.0):,.0f} MACs)"

    def _repr_html_(self) -> str:
        rows = [
            (number, ", ".join(site.layers), site.filters, f"{site.macs:,.0f}")
            for number, site in enumerate(self.sites)
        ]
        costs = ", ".join(f"{self.macs(rate):,.0f} at rate {rate:g}" for rate in (0.25, 0.5))
        title = f"{self!r}; {costs}"
        return make_html_table(title, ("site", "layers", "filters", "MACs"), rows)

    def summary(self) -> str:
        """Return a table of sites and costs, then the layers that stay full and dense values."""
        costs = {rate: self.macs(rate) for rate in (0.0, 0.25, 0.5)}
        return format_summary(self.sites, costs, self.full_layers, self.dense_fallbacks)


def elastic(
    net: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    *,
    coupled: bool = True,
    hidden: bool = False,
    check: bool = True,
) -> Elastic:
    """Make any traceable network elastic, without changing its code.

    With `coupled`, layers whose outputs are added or multiplied share one mask. With `hidden`,
    hidden linear layers of vectors become sites too. With `check`, one training pass each of the
    plain network, the elastic one and a subnet are compared, and a difference raises an error; a
    process compiles and checks the same architecture once.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> [site.filters for site in net.sites]
    [12, 24]
    >>> round(net.macs(0.5) / net.macs(0.0), 2)
    0.33
    """
    inputs = tuple(tensor.to(find_device(net)) for tensor in check_example(example))
    with TRACE_LOCK, preserve(net):
        switch_to_training(net)
        key = make_check_key(net, inputs, coupled=coupled, hidden=hidden)
        check = check and not has_passed(key)
        blanks = tuple(make_blank(tensor, tensor.shape[1:]) for tensor in inputs)
        if compiled := PASSED.get(key):
            return Elastic(net, compiled, blanks)
        graph = trace(net, inputs, twice=check)
        compiled = compile_network(net, graph, coupled=coupled, hidden=hidden)
        elastic_net = Elastic(net, compiled, blanks)
        if check and check_elastic(elastic_net, graph, inputs):
            # a program reads constants from the tensors of its own network, which may change
            has_constants = any("constant" in node.meta for node in graph.nodes)
            remember_pass(key, None if has_constants else compiled)
    return elastic_net
