"""Shared by DISTREAL and Coherent: rates from a table, random or ordered filters, four merges."""

from typing import Literal

from pliant.methods.aggregation import Updates, cover_step_share
from pliant.methods.base import TaskKey
from pliant.methods.filter_orders import make_count_table, make_device_order, select_prefix
from pliant.methods.server_optimisers import AnyServerOptimiser, S, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.pareto_table import ParetoTable, resolve_table
from pliant.nn.subnet import Sampling, Subnet

# New filters per mini-batch, one random order per round, or the natural order.
FilterChoice = Literal["batch", "round", "prefix"]
Merging = Literal["macs", "samples", "equal", "counts"]


def make_table(
    net: Elastic,
    table: ParetoTable | None,
    filters: FilterChoice,
    sampling: Sampling = "blocks",
) -> ParetoTable:
    """Return the table or, if None, equal rates; ordered filters cost whole filters."""
    table = resolve_table(table, net, sampling, can_scale=True)
    if filters == "batch":
        return table
    return make_count_table(net, table.rates, table.sides, table.batch_shares)


def select_ordered_subnet(
    net: Elastic, rates: tuple[float, ...], key: TaskKey, filters: FilterChoice, *, scaled: bool
) -> Subnet:
    """Return the subnet of the first filters at these rates, in a random or natural order."""
    order = make_device_order(net, key) if filters == "round" else None
    return select_prefix(net, rates, order, scaled)


def merge_updates(
    server: AnyServerOptimiser, net: Elastic, state: S, updates: Updates, merging: Merging
) -> S:
    """Merge updates by MACs, samples, alike, or per coordinate by the steps that trained it."""
    if merging == "counts":
        return merge_average(server, net, state, updates, "equal", cover_step_share)
    return merge_average(server, net, state, updates, merging)
