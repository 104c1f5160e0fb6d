"""Draw runs and tables as matplotlib figures: curves, timelines, fronts and trade-offs.

>>> import pliant as pl
>>> pl.plot.AXES["seconds"]
('seconds', 'seconds')
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pliant.analysis import pareto_plot
from pliant.analysis.curves import AXES as AXES
from pliant.analysis.curves import draw_learning_curves
from pliant.analysis.data_overview import load_data_overview
from pliant.analysis.runs import RunGroup, group_runs, load_runs, select_finished
from pliant.analysis.style import ReportFigure
from pliant.analysis.timeline import draw_timeline, load_tasks
from pliant.analysis.tradeoff import draw_tradeoff
from pliant.nn.pareto_table import ParetoTable
from pliant.value import encode


def curves(*runs: str | Path, axis: str = "seconds") -> Any:
    """Draw accuracy against rounds, seconds, macs or bytes, the mean over seeds with a band."""
    if axis not in AXES:
        raise ValueError(f"Expected an axis of {', '.join(AXES)}, got {axis!r}")
    return _get_figure(draw_learning_curves(_load_groups(runs), axis), "an evaluated round", runs)


def tradeoff(*runs: str | Path) -> Any:
    """Draw the last accuracy against bytes sent, with the clients' compute as area."""
    return _get_figure(draw_tradeoff("", _load_groups(runs)), "two evaluated groups of runs", runs)


def timeline(run: str | Path, first_round: int = 0, rounds: int = 3) -> Any:
    """Draw every mini-batch of some rounds of a run, darker where it cost more."""
    group = _load_groups([run])[0]
    overview, folder = load_data_overview(group.first_run), group.first_run
    tasks = load_tasks(folder, first_round, rounds)
    shares = overview.row_shares if overview else None
    sides = {record.round: record.side for record in folder.rounds}
    merges = folder["seconds"].tolist() if folder.is_asynchronous else ()
    figure = draw_timeline("0", group.label, tasks, shares, sides, merges)
    return _get_figure(
        figure, f"tasks in rounds {first_round} to {first_round + rounds - 1}", [run]
    )


def front(*tables: ParetoTable | str | Path) -> Any:
    """Draw what a search measured: the gain of each row against its cost."""
    vectors = []
    for index, table in enumerate(tables):
        if isinstance(table, ParetoTable):
            label = f"table {index + 1}" if len(tables) > 1 else "table"
            vectors.append(pareto_plot.make_rate_vectors(label, str(index), encode(table)))
        else:
            vectors += pareto_plot.load_rate_vectors([Path(table)], [])
    return _get_figure(pareto_plot.draw_pareto_front(vectors), "a table with gains", tables)


def _load_groups(runs: Sequence[str | Path]) -> list[RunGroup]:
    groups = select_finished(group_runs(load_runs([Path(run) for run in runs])))
    if not groups:
        names = ", ".join(map(str, runs)) or "no folder"
        raise ValueError(f"{names}: expected a run with a finished round, found none")
    return groups


def _get_figure(drawn: ReportFigure | None, needed: str, sources: Sequence[object]) -> Any:
    if drawn is None:
        raise ValueError(f"{', '.join(map(str, sources))}: expected {needed}, found none")
    drawn.figure._repr_png_ = partial(drawn.render, "png")  # what a notebook shows
    return drawn.figure
