"""Numbers of kept filters, for many subnets at once: how they are drawn, and what they cost.

A schedule of ten thousand devices needs the cost of every step, but no masks. Where each channel of
a value belongs to one site, the number of kept channels is a linear function of the numbers of kept
filters, and costs are products of such functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from pliant.nn.compiler.channels import ChannelSpans, SiteFilter
from pliant.nn.elastic import Elastic
from pliant.nn.net_cache import cache_on_net
from pliant.nn.subnet import Sampling, find_rounding_levels, round_up
from pliant.params import get_params
from pliant.rng import Address, sample_stream_uniforms

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SiteRates = tuple[tuple[float, ...], ...]  # (row, site)
_CHUNK = 1 << 21  # random numbers held at a time


def count_drawn_filters(
    net: Elastic,
    rates: SiteRates,
    rows: IntArray,
    sampling: Sampling,
    *,
    seed: int,
    address: tuple[Address, ...],
    numbers: Sequence[int],
) -> IntArray:  # (draw, site)
    """Return the counts of `net.draw(rates[row], rng_stream(seed, *address, number), sampling)`.

    >>> import numpy as np, torch
    >>> import pliant as pl
    >>> from pliant.nn.filter_counts import count_drawn_filters
    >>> net, rates = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28)), ((0.5, 0.25),)
    >>> many = dict(seed=0, address=("dropout",), numbers=range(7, 9))
    >>> count_drawn_filters(net, rates, np.array([0, 0]), "bernoulli", **many).tolist()
    [[8, 19], [7, 17]]
    >>> net.draw(rates[0], pl.rng_stream(0, "dropout", 7), "bernoulli").counts
    (8, 19)
    """
    coins = sum(net.sizes) if sampling == "bernoulli" else len(net.sizes)
    counts = np.empty((len(rows), len(net.sizes)), np.int64)
    chunk = max(1, _CHUNK // max(1, coins))
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        uniforms = sample_stream_uniforms(seed, *address, numbers=numbers[part], size=coins)
        if sampling == "bernoulli":
            counts[part] = _count_coins(net.sizes, 1 - np.array(rates), rows[part], uniforms)
        else:
            low, high, probability = _find_levels(net, rates, sampling)
            is_high = uniforms < probability[rows[part]]
            counts[part] = np.where(is_high, high[rows[part]], low[rows[part]])
    return counts


def _count_coins(
    sizes: tuple[int, ...], keep: FloatArray, rows: IntArray, uniforms: FloatArray
) -> IntArray:
    counts = np.empty((len(rows), len(sizes)), np.int64)
    start = 0
    for site, size in enumerate(sizes):
        is_kept = uniforms[:, start : start + size] < keep[rows, site, None]
        counts[:, site] = np.count_nonzero(is_kept, axis=1)
        start += size
    return np.maximum(counts, 1)


@cache_on_net
def _find_levels(
    net: Elastic, rates: SiteRates, sampling: Sampling
) -> tuple[IntArray, IntArray, FloatArray]:
    levels = [
        [
            find_rounding_levels(size, 1 - rate, sampling)
            for size, rate in zip(net.sizes, row, strict=True)
        ]
        for row in rates
    ]
    low, high, probability = np.moveaxis(np.array(levels, np.float64), -1, 0)
    return low.astype(np.int64), high.astype(np.int64), probability


def bound_drawn_filters(net: Elastic, rates: SiteRates, sampling: Sampling) -> IntArray:
    """Return the most filters that `net.draw` can keep at the rates of each row: (row, site)."""
    if sampling == "bernoulli":  # any number of independent filters may be kept
        return np.tile(np.array(net.sizes, np.int64), (len(rates), 1))
    low, high, probability = _find_levels(net, rates, sampling)
    return np.where(probability > 0, high, low)


@cache_on_net
def count_prefix_filters(net: Elastic, rates: SiteRates) -> IntArray:  # (row, site)
    """Return how many filters `net.select_prefix` keeps at the rates of each row."""
    return np.array([round_up(net.sizes, 1 - np.array(row)) for row in rates], np.int64)


@dataclass(frozen=True, eq=False)
class CountCosts:
    """Costs of many subnets, from the numbers of filters that their sites keep.

    >>> import numpy as np, torch
    >>> import pliant as pl
    >>> from pliant.nn.filter_counts import make_count_costs
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> costs, subnet = make_count_costs(net), net.select_prefix(0.5)
    >>> costs.macs(np.array([subnet.counts])).tolist() == [net.macs(subnet, training=True)]
    True
    >>> costs.nbytes(np.array([subnet.counts])).tolist()
    [15304.0]
    """

    # Of each layer, for a training step: cost × (outputs kept) × (inputs kept). A linear function
    # of counts has a row for each site and, last, a row of constants.
    layer_costs: FloatArray
    outputs: FloatArray
    inputs: FloatArray
    dims: tuple[FloatArray, ...]  # of each parameter and buffer, the sizes along its dimensions
    item_sizes: tuple[int, ...]  # of each parameter and buffer, in bytes

    def macs(self, counts: IntArray) -> FloatArray:
        """Return the MACs per sample of a training step of each subnet."""
        terms = _append_ones(counts)
        return np.asarray(((terms @ self.outputs) * (terms @ self.inputs)) @ self.layer_costs)

    def nbytes(self, counts: IntArray) -> FloatArray:
        """Return the bytes of each subnet's parameters and buffers."""
        terms, sizes = _append_ones(counts), zip(self.dims, self.item_sizes, strict=True)
        return np.asarray(sum((terms @ dims).prod(axis=1) * size for dims, size in sizes))


@cache_on_net
def make_count_costs(net: Elastic) -> CountCosts | None:
    """Return the costs by filter counts, or None if they depend on which filters are kept."""
    program, sizes, params = net.program, net.sizes, get_params(net.module)
    layers = program.layer_costs
    if program.fragile_spans:
        return None
    try:
        return CountCosts(
            np.array([layer.unit_macs * layer.passes for layer in layers], np.float64),
            _stack([_linearise(layer.outputs, sizes) for layer in layers], sizes),
            _stack([_linearise(layer.inputs, sizes) for layer in layers], sizes),
            tuple(
                _stack(
                    [
                        _linearise(spans, sizes, full_size)
                        for spans, full_size in zip_longest(program.slicings.get(name, ()), shape)
                    ],
                    sizes,
                )
                for name, shape in program.param_shapes.items()
            ),
            tuple(params[name].element_size() for name in program.param_shapes),
        )
    except _DependsOnFilters:
        return None


def _stack(functions: Sequence[FloatArray], sizes: tuple[int, ...]) -> FloatArray:
    return np.array(functions, np.float64).reshape(len(functions), len(sizes) + 1).T


class _DependsOnFilters(Exception):
    """A number of channels is not a function of the numbers of filters."""


def _linearise(spans: ChannelSpans | None, sizes: tuple[int, ...], size: int = 1) -> FloatArray:
    """Return the number of kept channels as one factor per site and a constant (none: `size`)."""
    factors = np.zeros(len(sizes) + 1)
    if spans is None:
        factors[-1] = size
    for span in spans or ():
        part = span.expression
        if part is None:
            factors[-1] += span.size * span.repeat
        elif isinstance(part, SiteFilter) and span.size == sizes[part.site]:
            factors[part.site] += span.repeat
        else:
            raise _DependsOnFilters
    return factors


def _append_ones(counts: IntArray) -> FloatArray:
    return np.column_stack([counts, np.ones(len(counts))]).astype(np.float64)
