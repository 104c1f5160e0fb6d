"""What DISTREAL and its kin share: rates from a table, filters by lot or by order, three merges."""

from collections.abc import Sequence
from typing import Literal

from pliant.devices import PerBatch, PerRound, Plan, Rows
from pliant.devices.plan import Budget
from pliant.explore.table import Table
from pliant.methods.average import move
from pliant.methods.base import Place, Update
from pliant.methods.merge import mean_change, stepped, weight_by
from pliant.methods.parts import counted_table, own_order, random_order, taken_first
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params

Filters = Literal["batch", "round", "prefix"]  # drawn anew, one random order a round, or their own
Merging = Literal["macs", "samples", "counts"]


def plan_of(table: Table, budget: Budget, *, adapts: bool, margin: float = 1.0) -> Plan:
    """Choose rows in front of every mini-batch, or once in front of the round."""
    rows = Rows(table.shares)
    return PerBatch(rows, budget) if adapts else PerRound(rows, margin)


def priced(net: Elastic, table: Table, filters: Filters) -> Table:
    """Return the table with the costs of what it is used for: counts that are rounded up."""
    return table if filters == "batch" else counted_table(net, table.rates)


def kept(
    net: Elastic, rates: tuple[float, ...], place: Place, filters: Filters, *, scaled: bool
) -> Subnet:
    """Return the first filters at these rates, of an order that holds for the round or for ever."""
    order = random_order(net, place) if filters == "round" else own_order(net)
    return taken_first(net, rates, order, scaled)


def merged(net: Elastic, params: Params, updates: Sequence[Update], merging: Merging) -> Params:
    """Add the mean change, by MACs, by samples, or per coordinate by the steps that trained it."""
    if merging == "counts":
        change = mean_change(net, params, updates, weight_by("equal"), stepped)
    else:
        change = mean_change(net, params, updates, weight_by(merging))
    return move(params, change)
