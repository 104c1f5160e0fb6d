"""Exact cost of a network: expected at dropout rates, in closed form, or of one subnet.

A MAC is a multiply-add of a convolution or linear layer, as torch.utils.flop_counter counts them
(two FLOPs each). Expectations are exact even if masks are concatenated, united, or shared by a
layer's input and output. They omit only the channel restored to a slice or product that would
otherwise be empty.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pliant.nn.compiler import channels
from pliant.nn.compiler.channels import ChannelSpans, Expression, SiteFilter
from pliant.nn.subnet import Sampling, Subnet, keep_probability


class SubnetCounts:
    """Numbers of channels that a subnet keeps."""

    def __init__(self, subnet: Subnet) -> None:
        masks = subnet.masks
        self.count: Callable[[ChannelSpans], int] = cache(lambda s: channels.count(s, masks))

    def count_pairs(self, outputs: ChannelSpans, inputs: ChannelSpans | None) -> int:
        return self.count(outputs) * (1 if inputs is None else self.count(inputs))


class ExpectedCounts:
    """Expected numbers of kept channels."""

    def __init__(self, sizes: Sequence[int], keep: NDArray[np.float64], sampling: Sampling) -> None:
        self._sizes, kept = sizes, keep.tolist()

        @cache
        def compute(site: int, num_kept: int, num_dropped: int) -> float:
            return keep_probability(sizes[site], kept[site], sampling, num_kept, num_dropped)

        self.keep_probability = compute  # that a site keeps and drops these numbers of filters

    def count(self, spans: ChannelSpans) -> float:
        return sum(
            span.size * span.repeat * self._probability(span.expression, {}) for span in spans
        )

    def _probability(self, expression: Expression, conditions: Mapping[SiteFilter, bool]) -> float:
        return channels.compute_probability(expression, self.keep_probability, conditions)

    def count_pairs(self, outputs: ChannelSpans, inputs: ChannelSpans | None) -> float:
        """Return the expectation of kept outputs × kept inputs (None: one input per output)."""
        if inputs is None:
            return self.count(outputs)
        expression = outputs[0].expression
        if len(set(outputs)) != 1 or not isinstance(expression, SiteFilter):
            return self.count(outputs) * self.count(inputs)
        if len(outputs) > 1:  # parts that share a mask
            return len(outputs) * self.count_pairs(outputs[:1], inputs)
        site, independent, total = expression.site, [], 0.0
        for span in inputs:
            filters = channels.collect_filters(span.expression)
            shared = [site_filter for site_filter in filters if site_filter.site == site]
            if shared:
                pairs = self._count_shared_pairs(span.expression, site, shared)
                total += span.size * span.repeat * pairs
            else:
                independent.append(span)
        return total + self.count(outputs) * self.count(tuple(independent))

    def _count_shared_pairs(
        self, expression: Expression, site: int, own_filters: list[SiteFilter]
    ) -> float:
        """Return the expected number of kept filters of a site that meet this channel."""
        other = SiteFilter(site, -1)  # any filter that does not decide about the channel
        counts = {**dict.fromkeys(own_filters, 1), other: self._sizes[site] - len(own_filters)}
        return self.keep_probability(site, 1, 0) * sum(
            count * self._probability(expression, {site_filter: True})
            for site_filter, count in counts.items()
            if count
        )
