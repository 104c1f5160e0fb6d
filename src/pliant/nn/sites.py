"""The sites of a network: layers whose filters can be dropped together."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from pliant.nn.compiler import channels
from pliant.nn.compiler.coupling import LayerGroup
from pliant.nn.compiler.graphs import name_layer
from pliant.nn.compiler.program import CompactProgram, DenseFallback
from pliant.value import Value


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
                feeds[site][name_layer(cost.layer)] = None
    return tuple(
        Site(
            tuple(map(name_layer, group.layers)),
            group.filters,
            sum(macs[layer] for layer in group.layers),
            tuple(readers),
        )
        for group, readers in zip(groups, feeds, strict=True)
    )


def format_summary(
    sites: Sequence[Site],
    costs: Mapping[float, float],
    full_layers: Mapping[str, str],
    dense_fallbacks: Sequence[DenseFallback],
) -> str:
    """Return a table of sites, MACs by rate, and what is not narrowed."""
    head = f"{'site':>4}  {'filters':>7}  {'MACs':>12}  layers (read by)"
    rows = [
        f"{index:>4}  {site.filters:>7}  {site.macs:>12,}  {', '.join(site.layers)}"
        f" ({', '.join(site.feeds)})"
        for index, site in enumerate(sites)
    ]
    whole = costs[0.0] or 1.0
    totals = [
        f"MACs per sample at rate {rate}: {macs:,.0f} ({macs / whole:.3f})"
        for rate, macs in costs.items()
    ]
    full = [f"full: {layer}: {reason}" for layer, reason in full_layers.items()]
    dense = [f"dense: {f.value} for {f.reader}: {f.reason}" for f in dense_fallbacks]
    return "\n".join([head, *rows, *totals, *full, *(dense or ["no value had to be made dense"])])


def compute_fingerprint(program: CompactProgram, sites: Sequence[Site]) -> str:
    """Return a hash of a network's parameters, sites and costs."""
    parts = [f"{name}:{shape}" for name, shape in sorted(program.param_shapes.items())]
    parts += [f"{site.layers}:{site.filters}" for site in sites]
    parts += [f"{cost.layer}:{cost.unit_macs}" for cost in program.layer_costs]
    return sha256("|".join(parts).encode()).hexdigest()[:16]


def format_sizes(sizes: Sequence[int]) -> str:
    """Write the numbers of filters, without those after the first six."""
    text = ", ".join(map(str, sizes[:6]))
    return f"{text}, …" if len(sizes) > 6 else text


class ElasticOptions(Value, frozen=True):
    """Which layers of a network become sites, as in `elastic`.

    >>> import pliant as pl
    >>> pl.ElasticOptions(hidden=True).coupled
    True
    """

    coupled: bool = True
    hidden: bool = False
