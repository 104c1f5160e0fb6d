"""Exact cost of a network at rates (in expectation, closed form) or for one subnet (realised).

A MAC is a multiply-add of a convolution or linear layer, as torch.utils.flop_counter counts them
(two FLOPs each). Expectations are exact, also where draws are concatenated, united, or shared
between a layer's input and output; only the channel that is kept where a slice or a product would
lose all of its channels is not in them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pliant.nn import channels
from pliant.nn.channels import Drawn, Expression, Pieces
from pliant.nn.decisions import Group
from pliant.nn.plan import Claim, Plan, Work
from pliant.nn.subnet import Choice, Subnet, chance


class Expectation:
    """What a choice of filters keeps on average."""

    def __init__(self, groups: Sequence[Group], keep: NDArray[np.float64], choice: Choice) -> None:
        self.size = [group.filters for group in groups]
        self._asked = [
            (group.filters, float(rate), choice) for group, rate in zip(groups, keep, strict=True)
        ]
        self._known: dict[tuple[int, int, int], float] = {}

    def chance(self, site: int, kept: int, dropped: int) -> float:
        """Return how likely a site keeps these many given filters and drops those many others."""
        asked = (site, kept, dropped)
        if asked not in self._known:
            self._known[asked] = chance(*self._asked[site], kept, dropped)
        return self._known[asked]

    def count(self, pieces: Pieces) -> float:
        """Return the expected number of channels that are there."""
        return sum(
            piece.size * piece.repeat * channels.probability(piece.expression, self.chance, {})
            for piece in pieces
        )

    def product(self, outputs: Pieces, inputs: Pieces) -> float:
        """Return the expectation of kept outputs × kept inputs of one layer."""
        drawn = outputs[0].expression
        if len(outputs) != 1 or not isinstance(drawn, Drawn):
            return self.count(outputs) * self.count(inputs)
        site, apart, total = drawn.site, [], 0.0
        for piece in inputs:
            own = [read for read in channels.filters_of(piece.expression) if read.site == site]
            if own:
                total += piece.size * piece.repeat * self._shared(piece.expression, site, own)
            else:
                apart.append(piece)
        return total + self.count(outputs) * self.count(tuple(apart))

    def _shared(self, expression: Expression, site: int, own: list[Drawn]) -> float:
        """Return the expected kept filters of a site, counted when a channel is there."""
        other = Drawn(site, -1)  # stands for each filter that the channel does not ask about
        filters = [(each, 1) for each in own] + [(other, self.size[site] - len(own))]
        return self.chance(site, 1, 0) * sum(
            number * channels.probability(expression, self.chance, {each: True})
            for each, number in filters
            if number
        )


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
    return sum(
        _entries(shape, plan.claims.get(name, (None,) * len(shape)), subnet)
        for name, shape in plan.shapes.items()
    )


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
