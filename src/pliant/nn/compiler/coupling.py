"""Decisions about layers: which have droppable filters, and which must share one mask."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm

import numpy as np

from pliant.nn.compiler.channels import Index


@dataclass
class Decisions:
    """Decisions so far; a layer is identified by the name of its weight."""

    coupled: bool = True
    fixed: dict[str, str] = field(default_factory=dict)  # keep all filters, and why
    unsliced: set[str] = field(default_factory=set)  # parameters kept in full
    parent: dict[str, str] = field(default_factory=dict)  # shares a mask with that layer
    # a layer and a number of its outputs after which its mask repeats
    periods: set[tuple[str, int]] = field(default_factory=set)
    # a layer and a number of adjacent outputs, such as those of an attention head, in one filter
    blocks: set[tuple[str, int]] = field(default_factory=set)

    def find_root(self, layer: str) -> str:
        """Return the representative of the layers that share this layer's mask."""
        while layer in self.parent:
            layer = self.parent[layer]
        return layer

    def size(self) -> int:
        parts = (self.fixed, self.unsliced, self.parent, self.periods, self.blocks)
        return sum(map(len, parts))

    def find_block(self, layer: str) -> int:
        """Return how many adjacent outputs of a layer make one filter."""
        return lcm(*(block for name, block in self.blocks if name == layer))


@dataclass(frozen=True)
class Candidate:
    """A layer whose filters may be dropped."""

    outputs: int  # of each group
    dim: int  # of its weight, along the outputs
    is_flat: bool  # a linear layer of vectors, not of sequences


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one mask, which repeats in a layer that has more filters."""

    layers: tuple[str, ...]
    filters: int
    blocks: tuple[int, ...]  # of each layer, the adjacent outputs that make one filter
    dims: tuple[int, ...]  # of each layer's weight, the dimension of its outputs

    def list_outputs(self, shape_of: Callable[[str], Sequence[int]]) -> dict[str, Index]:
        """Return, for each layer, the filter that each of its outputs belongs to."""
        members = zip(self.layers, self.blocks, self.dims, strict=True)
        return {
            layer: np.arange(shape_of(layer)[dim]) // block % self.filters
            for layer, block, dim in members
        }


def group_layers(
    candidates: Mapping[str, Candidate], decisions: Decisions
) -> tuple[LayerGroup, ...]:
    members: dict[str, list[str]] = {}
    for layer in candidates:
        members.setdefault(decisions.find_root(layer), []).append(layer)
    counts = {layer: candidate.outputs for layer, candidate in candidates.items()}
    for layer, period in decisions.periods:
        counts[layer] = gcd(counts[layer], period)
    groups = []
    for layers in members.values():
        blocks = tuple(map(decisions.find_block, layers))
        pairs = list(zip((counts[layer] for layer in layers), blocks, strict=True))
        is_whole = all(count % block == 0 for count, block in pairs)
        if is_whole and decisions.fixed.keys().isdisjoint(layers):
            filters = gcd(*(count // block for count, block in pairs))
            dims = tuple(candidates[layer].dim for layer in layers)
            groups.append(LayerGroup(tuple(layers), filters, blocks, dims))
    return tuple(groups)
