"""Exact cost of a network: expected at dropout rates, in closed form, or of one subnet.

A MAC is a multiply-add of a convolution or linear layer, as torch.utils.flop_counter counts them
(two FLOPs each). Expectations are exact even if masks are concatenated, united, or shared by a
layer's input and output. They omit only the channel restored to a slice or product that would
otherwise be empty.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pliant.nn.compiler import channels
from pliant.nn.compiler.channels import ChannelSpans, Expression, SiteFilter
from pliant.nn.compiler.coupling import LayerGroup
from pliant.nn.compiler.program import CompactProgram, LayerCost, ParamSlicing
from pliant.nn.subnet import Sampling, Subnet, keep_probability


class ExpectedCounts:
    """Expected numbers of kept channels."""

    def __init__(
        self, groups: Sequence[LayerGroup], keep: NDArray[np.float64], sampling: Sampling
    ) -> None:
        self.sizes = [group.filters for group in groups]
        self._distributions = [
            (group.filters, float(rate), sampling) for group, rate in zip(groups, keep, strict=True)
        ]
        self._cache: dict[tuple[int, int, int], float] = {}

    def keep_probability(self, site: int, num_kept: int, num_dropped: int) -> float:
        """Return the probability that a site keeps and drops these numbers of filters."""
        key = (site, num_kept, num_dropped)
        if key not in self._cache:
            self._cache[key] = keep_probability(*self._distributions[site], num_kept, num_dropped)
        return self._cache[key]

    def count(self, spans: ChannelSpans) -> float:
        """Return the expected number of kept channels."""
        return sum(
            span.size
            * span.repeat
            * channels.compute_probability(span.expression, self.keep_probability, {})
            for span in spans
        )

    def count_pairs(self, outputs: ChannelSpans, inputs: ChannelSpans) -> float:
        """Return the expectation of kept outputs × kept inputs of one layer."""
        expression = outputs[0].expression
        if len(outputs) != 1 or not isinstance(expression, SiteFilter):
            return self.count(outputs) * self.count(inputs)
        site, independent, total = expression.site, [], 0.0
        for span in inputs:
            shared = [
                site_filter
                for site_filter in channels.collect_filters(span.expression)
                if site_filter.site == site
            ]
            if shared:
                total += (
                    span.size
                    * span.repeat
                    * self._count_shared_pairs(span.expression, site, shared)
                )
            else:
                independent.append(span)
        return total + self.count(outputs) * self.count(tuple(independent))

    def _count_shared_pairs(
        self, expression: Expression, site: int, own_filters: list[SiteFilter]
    ) -> float:
        """Return the expected number of kept filters of a site that meet this channel."""
        other = SiteFilter(site, -1)  # any filter that does not decide about the channel
        filters = [(site_filter, 1) for site_filter in own_filters] + [
            (other, self.sizes[site] - len(own_filters))
        ]
        return self.keep_probability(site, 1, 0) * sum(
            count
            * channels.compute_probability(expression, self.keep_probability, {site_filter: True})
            for site_filter, count in filters
            if count
        )


def compute_expected_macs(
    layer_costs: Sequence[LayerCost], expected: ExpectedCounts, *, training: bool
) -> float:
    """Return the expected MACs per sample, of the forward pass or of a training step."""
    return sum(
        layer_cost.unit_macs
        * (
            expected.count(layer_cost.outputs)
            if layer_cost.inputs is None
            else expected.count_pairs(layer_cost.outputs, layer_cost.inputs)
        )
        * (layer_cost.passes if training else 1)
        for layer_cost in layer_costs
    )


def count_macs(layer_costs: Sequence[LayerCost], subnet: Subnet, *, training: bool) -> int:
    """Return the MACs per sample of one subnet."""
    counts: dict[ChannelSpans, int] = {}

    def count(spans: ChannelSpans) -> int:
        if spans not in counts:
            counts[spans] = channels.count(spans, subnet.masks)
        return counts[spans]

    return sum(
        layer_cost.unit_macs
        * count(layer_cost.outputs)
        * (1 if layer_cost.inputs is None else count(layer_cost.inputs))
        * (layer_cost.passes if training else 1)
        for layer_cost in layer_costs
    )


def count_params(program: CompactProgram, subnet: Subnet) -> int:
    """Return the number of entries in a subnet's parameters and buffers."""
    return sum(
        _count_entries(shape, program.slicings.get(name, (None,) * len(shape)), subnet)
        for name, shape in program.param_shapes.items()
    )


def _count_entries(shape: tuple[int, ...], slicing: ParamSlicing, subnet: Subnet) -> int:
    sizes = [
        size if spans is None else channels.count(spans, subnet.masks)
        for size, spans in zip(shape, slicing, strict=True)
    ]
    return int(np.prod(sizes, dtype=np.int64))


def count_activations(program: CompactProgram, subnet: Subnet) -> int:
    """Return the number of activations per sample that the forward pass writes."""
    return sum(
        activation.unit_size * channels.count(activation.spans, subnet.masks)
        for activation in program.activations
    )


def compute_expected_activations(program: CompactProgram, expected: ExpectedCounts) -> float:
    """Return the expected number of activations per sample."""
    return sum(
        activation.unit_size * expected.count(activation.spans)
        for activation in program.activations
    )
