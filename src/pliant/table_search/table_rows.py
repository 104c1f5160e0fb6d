"""Turn measured vectors into the rows of a table: thinned, monotone, gaps filled."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from pliant.nn.elastic import Elastic
from pliant.nn.pareto_table import ParetoTable, count_step_macs, describe_layers
from pliant.nn.subnet import Sampling
from pliant.table_search.pareto import FloatArray
from pliant.table_search.search_space import SearchSpace, round_rates
from pliant.table_search.step_time import StepTimeModel

BISECTION_STEPS = 40


class TableRows(NamedTuple):
    """Vectors sorted by cost, with gains that rise too."""

    vectors: FloatArray  # (row, gene)
    costs: FloatArray
    gains: FloatArray


def thin_vectors(vectors: FloatArray, costs: FloatArray, count: int) -> FloatArray:
    """Select `count` vectors, evenly spaced in cost, with both ends."""
    order = np.argsort(costs, kind="stable")
    if len(order) <= count:
        return vectors[order]
    selected = {0, len(order) - 1}
    for target in np.linspace(costs[order[0]], costs[order[-1]], count)[1:-1].tolist():
        unused = [rank for rank in range(len(order)) if rank not in selected]
        selected.add(min(unused, key=lambda rank: abs(float(costs[order[rank]]) - target)))
    return vectors[order[sorted(selected)]]


def select_monotone(vectors: FloatArray, costs: FloatArray, gains: FloatArray) -> TableRows:
    """Drop vectors that cost more and gain less than another; keep the cheapest and the dearest.

    The dearest is the full network. Where a cheaper vector scored better, by luck or because
    dropout helps, the full network gets the same gain.
    """
    order = np.lexsort((-gains, -vectors.sum(axis=1), costs))
    selected, best = [], -np.inf
    for index in order[:-1].tolist():
        if gains[index] > best:
            selected.append(index)
            best = float(gains[index])
    last = int(order[-1])
    if selected and costs[selected[-1]] == costs[last]:
        selected.pop()
    selected.append(last)
    return TableRows(vectors[selected], costs[selected], np.maximum.accumulate(gains[selected]))


def fill_gaps(
    rows: TableRows, count: int, cost: Callable[[FloatArray], FloatArray], levels: int = 0
) -> TableRows:
    """Insert rows into the widest gaps until there are `count` of them.

    A new vector lies on the line between its neighbours and costs the mean of both. Where the cost
    on that line leaves the interval, or where one of the last `levels` genes differs, the gap
    stays.
    """
    is_closed = (np.diff(rows.vectors[:, rows.vectors.shape[1] - levels :], axis=0) != 0).any(
        axis=1
    )
    while len(rows.costs) < count and not is_closed.all():
        gap = int(np.where(is_closed, -np.inf, np.diff(rows.costs)).argmax())
        new_row = _interpolate_row(rows, gap, cost)
        if new_row is None:
            is_closed[gap] = True
            continue
        vector, vector_cost, gain = new_row
        rows = TableRows(
            np.insert(rows.vectors, gap + 1, vector, axis=0),
            np.insert(rows.costs, gap + 1, vector_cost),
            np.insert(rows.gains, gap + 1, gain),
        )
        is_closed = np.insert(is_closed, gap + 1, False)
    return rows


def _interpolate_row(
    rows: TableRows, index: int, cost: Callable[[FloatArray], FloatArray]
) -> tuple[FloatArray, float, float] | None:
    low, high = rows.vectors[index], rows.vectors[index + 1]
    low_cost, high_cost = float(rows.costs[index]), float(rows.costs[index + 1])
    target, start, end = (low_cost + high_cost) / 2, 0.0, 1.0
    for _ in range(BISECTION_STEPS):
        share = (start + end) / 2
        share_cost = float(cost(round_rates((1 - share) * low + share * high)[None])[0])
        start, end = (share, end) if share_cost < target else (start, share)
    vector = round_rates((1 - end) * low + end * high)
    vector_cost = float(cost(vector[None])[0])
    if not low_cost < vector_cost < high_cost:
        return None
    part = (vector_cost - low_cost) / (high_cost - low_cost)
    low_gain, high_gain = rows.gains[index], rows.gains[index + 1]
    gain = np.clip((1 - part) * low_gain + part * high_gain, low_gain, high_gain)  # may round below
    return vector, vector_cost, float(gain)


def build_table(
    net: Elastic,
    rows: TableRows,
    space: SearchSpace,
    sampling: Sampling,
    profile: StepTimeModel | None = None,
) -> ParetoTable:
    """Build a table of the rows that rise in MACs and, with a profile, in seconds."""
    full_macs = net.macs(0.0, training=True)
    trials = [space.make_trial(vector, 0) for vector in rows.vectors]
    steps = [(trial.rates, trial.side, trial.batch) for trial in trials]
    shares = [count_step_macs(net, *step, sampling) / full_macs for step in steps]
    seconds = [profile.predict_seconds(net, *step) if profile else 0.0 for step in steps]
    selected = [len(shares) - 1]  # the full network: the dearest in both
    for row in reversed(range(len(shares) - 1)):
        if shares[row] <= shares[selected[0]] and seconds[row] <= seconds[selected[0]]:
            selected.insert(0, row)
    return ParetoTable(
        net.fingerprint,
        tuple(trials[row].rates for row in selected),
        tuple(shares[row] for row in selected),
        tuple(float(rows.gains[row]) for row in selected),
        tuple(seconds[row] for row in selected) if profile else (),
        describe_layers(net),
        full_macs,
        tuple(trials[row].side for row in selected) if len(space.sides) > 1 else (),
        tuple(trials[row].batch for row in selected) if len(space.batch_shares) > 1 else (),
    )


def join_stages(tables: Sequence[ParetoTable], stages: Sequence[float]) -> ParetoTable:
    """Return one table with the rows of all stages; a single table as it is."""
    first, *others = tables
    if not others:
        return first
    columns = {
        name: tuple(chain.from_iterable(getattr(table, name) for table in tables))
        for name in ("rates", "shares", "gains", "seconds", "sides", "batch_shares")
    }
    pairs = zip(tables, stages, strict=True)
    row_stages = tuple(stage for table, stage in pairs for _ in table.rates)
    return replace(first, **columns, stages=row_stages)
