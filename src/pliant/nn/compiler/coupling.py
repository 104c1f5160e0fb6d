"""Decisions about layers: which have droppable filters, and which must share one mask."""

from dataclasses import dataclass, field
from math import gcd


@dataclass
class Decisions:
    """Decisions so far; a layer is identified by the name of its weight."""

    coupled: bool = True
    fixed: dict[str, str] = field(default_factory=dict)  # keep all filters, and why
    unsliced: set[str] = field(default_factory=set)  # parameters kept in full
    parent: dict[str, str] = field(default_factory=dict)  # shares a mask with that layer
    # a layer and a number of filters after which its mask repeats
    periods: set[tuple[str, int]] = field(default_factory=set)

    def find_root(self, layer: str) -> str:
        """Return the representative of the layers that share this layer's mask."""
        while layer in self.parent:
            layer = self.parent[layer]
        return layer

    def size(self) -> int:
        return len(self.fixed) + len(self.unsliced) + len(self.parent) + len(self.periods)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one mask, which repeats in a layer that has more filters."""

    layers: tuple[str, ...]
    filters: int


def group_layers(candidates: dict[str, int], decisions: Decisions) -> tuple[LayerGroup, ...]:
    members: dict[str, list[str]] = {}
    for layer in candidates:
        members.setdefault(decisions.find_root(layer), []).append(layer)
    counts = dict(candidates)
    for layer, period in decisions.periods:
        counts[layer] = gcd(counts[layer], period)
    return tuple(
        LayerGroup(tuple(layers), gcd(*(counts[layer] for layer in layers)))
        for layers in members.values()
        if decisions.fixed.keys().isdisjoint(layers)
    )
