"""Shared by DISTREAL and Coherent: rates from a table, random or ordered filters, three merges."""

from collections.abc import Sequence
from typing import Literal

from pliant.devices import BudgetPolicy, CostRows, PerBatch, PerRound
from pliant.devices.budget import Budget
from pliant.methods.aggregation import apply_delta, average_deltas, cover_step_share, weight_by
from pliant.methods.base import TaskKey, Update
from pliant.methods.filter_orders import (
    make_count_table,
    make_device_order,
    make_natural_order,
    select_prefix,
)
from pliant.nn.elastic import Elastic
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.subnet import Subnet
from pliant.params import Params

# New filters per mini-batch, one random order per round, or the natural order.
FilterChoice = Literal["batch", "round", "prefix"]
Merging = Literal["macs", "samples", "counts"]


def make_table_policy(
    table: ParetoTable, budget: Budget, *, is_adaptive: bool, margin: float = 1.0
) -> BudgetPolicy:
    """Make a policy that chooses rows before every mini-batch, or once per round."""
    rows = CostRows(table.shares)
    return PerBatch(rows, budget) if is_adaptive else PerRound(rows, margin)


def recompute_costs(net: Elastic, table: ParetoTable, filters: FilterChoice) -> ParetoTable:
    """Return the table with the costs of whole filters where the filters are ordered."""
    return table if filters == "batch" else make_count_table(net, table.rates)


def select_ordered_subnet(
    net: Elastic, rates: tuple[float, ...], key: TaskKey, filters: FilterChoice, *, scaled: bool
) -> Subnet:
    """Return the subnet of the first filters at these rates, in a random or natural order."""
    order = make_device_order(net, key) if filters == "round" else make_natural_order(net)
    return select_prefix(net, rates, order, scaled)


def merge_updates(
    net: Elastic, params: Params, updates: Sequence[Update], merging: Merging
) -> Params:
    """Merge updates by MACs, by samples, or per coordinate by the steps that trained it."""
    if merging == "counts":
        delta = average_deltas(net, params, updates, weight_by("equal"), cover_step_share)
    else:
        delta = average_deltas(net, params, updates, weight_by(merging))
    return apply_delta(params, delta)
