"""The sites of a network: layers whose filters can be dropped together."""

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
    return tuple(_describe_site(site, group, program) for site, group in enumerate(groups))


def _describe_site(site: int, group: LayerGroup, program: CompactProgram) -> Site:
    costs = program.layer_costs
    feeds = [
        _layer_name(cost.layer)
        for cost in costs
        if any(site in channels.collect_sites(span.expression) for span in cost.inputs or ())
    ]
    macs = sum(
        cost.unit_macs * channels.width(cost.outputs) * (channels.width(cost.inputs or ()) or 1)
        for cost in costs
        if cost.layer in group.layers
    )
    names = tuple(map(_layer_name, group.layers))
    return Site(names, group.filters, macs, tuple(dict.fromkeys(feeds)))


def _layer_name(weight: str) -> str:
    return weight.removesuffix(".weight")


def compute_fingerprint(program: CompactProgram, sites: Sequence[Site]) -> str:
    """Return a hash of a network's parameters, sites and costs."""
    parts = [f"{name}:{shape}" for name, shape in sorted(program.param_shapes.items())]
    parts += [f"{site.layers}:{site.filters}" for site in sites]
    parts += [f"{cost.layer}:{cost.unit_macs}" for cost in program.layer_costs]
    return sha256("|".join(parts).encode()).hexdigest()[:16]
