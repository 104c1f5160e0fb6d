"""What is decided about the layers of a network: which are drawn, and which of them together."""

from dataclasses import dataclass, field


@dataclass
class Decisions:
    """What was found about the layers so far; a layer goes by the name of its weight."""

    coupled: bool = True
    fixed: set[str] = field(default_factory=set)  # never drawn
    rigid: set[str] = field(default_factory=set)  # parameters that read all channels
    partner: dict[str, str] = field(default_factory=dict)  # drawn with that one

    def root(self, layer: str) -> str:
        """Return the layer that stands for all that are drawn with this one."""
        while layer in self.partner:
            layer = self.partner[layer]
        return layer

    def size(self) -> int:
        """Return how much was decided."""
        return len(self.fixed) + len(self.rigid) + len(self.partner)


@dataclass(frozen=True)
class Group:
    """Layers that are drawn together."""

    layers: tuple[str, ...]
    filters: int


def groups_of(candidates: dict[str, int], decisions: Decisions) -> tuple[Group, ...]:
    """Return the layers that are drawn, those together that must be."""
    members: dict[str, list[str]] = {}
    for layer in candidates:
        members.setdefault(decisions.root(layer), []).append(layer)
    return tuple(
        Group(tuple(layers), candidates[layers[0]])
        for layers in members.values()
        if not decisions.fixed.intersection(layers)
    )
