"""Exact cost of a network at rates (in expectation, closed form) or for one subnet (realised).

A MAC is a multiply-add of a convolution or linear layer, as torch.utils.flop_counter counts them
(two FLOPs each). Expectations are exact for independent coins also where draws are concatenated,
united, or shared between a layer's input and output.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pliant.nn import channels
from pliant.nn.channels import Drawn, Pieces
from pliant.nn.lower import Group
from pliant.nn.plan import Claim, Plan, Work
from pliant.nn.subnet import Choice, Subnet, moments


class Expectation:
    """The first two moments of every site's number of kept filters."""

    def __init__(self, groups: Sequence[Group], keep: NDArray[np.float64], choice: Choice) -> None:
        found = [
            moments(group.filters, float(rate), choice)
            for group, rate in zip(groups, keep, strict=True)
        ]
        self.mean = [mean for mean, _ in found]
        self.square = [square for _, square in found]
        self.size = [group.filters for group in groups]
        self.keep = [mean / size for mean, size in zip(self.mean, self.size, strict=True)]

    def count(self, pieces: Pieces) -> float:
        """Return the expected number of channels that are there."""
        return sum(
            piece.size * piece.repeat * channels.probability(piece.expression, self.keep, {})
            for piece in pieces
        )

    def product(self, outputs: Pieces, inputs: Pieces) -> float:
        """Return the expectation of kept outputs × kept inputs of one layer."""
        drawn = outputs[0].expression
        if len(outputs) != 1 or not isinstance(drawn, Drawn):
            return self.count(outputs) * self.count(inputs)
        site, total = drawn.site, 0.0
        # with a filter of this very site there (or not), how many of its filters are there?
        with_one = self.square[site] / self.size[site]
        without = self.mean[site] - with_one
        for piece in inputs:
            if site in channels.sites_of(piece.expression):
                yes = channels.probability(piece.expression, self.keep, {site: 1.0})
                no = channels.probability(piece.expression, self.keep, {site: 0.0})
                each = yes * with_one + no * without
            else:
                each = self.mean[site] * channels.probability(piece.expression, self.keep, {})
            total += piece.size * piece.repeat * each
        return total


def expected_macs(works: Sequence[Work], at: Expectation, *, training: bool) -> float:
    """Return the expected MACs per sample, forward or forward and backward."""
    return sum(
        work.each
        * (at.count(work.outputs) if work.inputs is None else at.product(work.outputs, work.inputs))
        * (work.passes if training else 1)
        for work in works
    )


def realised_macs(works: Sequence[Work], subnet: Subnet, *, training: bool) -> int:
    """Return the MACs per sample of one subnet."""
    known: dict[Pieces, int] = {}

    def count(pieces: Pieces) -> int:
        if pieces not in known:
            known[pieces] = channels.count(pieces, subnet.masks)
        return known[pieces]

    return sum(
        work.each
        * count(work.outputs)
        * (1 if work.inputs is None else count(work.inputs))
        * (work.passes if training else 1)
        for work in works
    )


def parameters(plan: Plan, subnet: Subnet) -> int:
    """Return how many numbers a subnet's parameters and buffers hold."""
    return sum(_entries(plan.shapes[name], claim, subnet) for name, claim in plan.claims.items())


def _entries(shape: tuple[int, ...], claim: Claim, subnet: Subnet) -> int:
    sizes = [
        size if pieces is None else channels.count(pieces, subnet.masks)
        for size, pieces in zip(shape, claim, strict=True)
    ]
    return int(np.prod(sizes, dtype=np.int64))


def activations(plan: Plan, subnet: Subnet) -> int:
    """Return how many numbers per sample the forward pass writes."""
    return sum(made.each * channels.count(made.pieces, subnet.masks) for made in plan.written)


def expected_activations(plan: Plan, at: Expectation) -> float:
    """Return how many numbers per sample the forward pass writes in expectation."""
    return sum(made.each * at.count(made.pieces) for made in plan.written)
