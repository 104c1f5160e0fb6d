"""The sites of a network: layers whose filters can be dropped together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from pliant.nn.compiler import channels
from pliant.nn.compiler.coupling import LayerGroup
from pliant.nn.compiler.program import CompactProgram


@dataclass(frozen=True)
class Site:
    """Layers that share one mask over their filters."""

    layers: tuple[str, ...]
    filters: int
    macs: int  # forward, per sample, in the full network
    feeds: tuple[str, ...]  # layers that read the outputs of these


def describe_sites(groups: Sequence[LayerGroup], program: CompactProgram) -> tuple[Site, ...]:
    """Describe what each group of layers drops, costs and feeds."""
    macs: defaultdict[str, int] = defaultdict(int)  # by layer
    feeds: list[dict[str, None]] = [{} for _ in groups]  # in order, without repeats
    for cost in program.layer_costs:
        inputs = cost.inputs or ()
        macs[cost.layer] += (
            cost.unit_macs * channels.width(cost.outputs) * (channels.width(inputs) or 1)
        )
        for span in inputs:
            for site in channels.collect_sites(span.expression):
                feeds[site][_layer_name(cost.layer)] = None
    return tuple(
        Site(
            tuple(map(_layer_name, group.layers)),
            group.filters,
            sum(macs[layer] for layer in group.layers),
            tuple(readers),
        )
        for group, readers in zip(groups, feeds, strict=True)
    )


def _layer_name(weight: str) -> str:
    return weight.removesuffix(".weight")


def compute_fingerprint(program: CompactProgram, sites: Sequence[Site]) -> str:
    """Return a hash of a network's parameters, sites and costs."""
    parts = [f"{name}:{shape}" for name, shape in sorted(program.param_shapes.items())]
    parts += [f"{site.layers}:{site.filters}" for site in sites]
    parts += [f"{cost.layer}:{cost.unit_macs}" for cost in program.layer_costs]
    return sha256("|".join(parts).encode()).hexdigest()[:16]
