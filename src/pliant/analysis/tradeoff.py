"""Draw the trade-off between accuracy, traffic and client compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pliant.analysis.labels import place_labels
from pliant.analysis.runs import SPLIT, RunGroup
from pliant.analysis.style import (
    TEXT_COLOUR,
    ReportFigure,
    format_percent,
    format_quantity,
    make_figure,
)
from pliant.analysis.summary import compute_mean_and_std
from pliant.extras import require
from pliant.table_search.pareto import find_undominated

MAX_AREA = 620.0  # points², for the group with the most MACs
CLOSE = 0.01  # of accuracy: a point
LOG_SCALE_RATIO = 20.0  # a wider range of traffic gets a logarithmic axis
FILL_COLOUR, EDGE_COLOUR, PALE_COLOUR = "#9ecae1", "#0b3c5d", "#66717d"


@dataclass(frozen=True)
class TradeoffPoint:
    """One group: means over its seeds, with standard deviations."""

    label: str
    is_split: bool
    accuracy: tuple[float, float]
    traffic: tuple[float, float]  # bytes, up and down
    macs: tuple[float, float]  # of all clients
    seeds: int
    is_pareto_optimal: bool = False  # no other group is at least as good in all three


def compute_tradeoff_points(groups: Sequence[RunGroup]) -> list[TradeoffPoint]:
    """Return one point per group that has an evaluation."""
    points = []
    for group in groups:
        scored = [run for run in group.runs if run.final_accuracy is not None]
        if not scored:
            continue
        accuracy = compute_mean_and_std([run.final_accuracy or 0.0 for run in scored])
        traffic = compute_mean_and_std([run.total("down", "up") for run in scored])
        macs = compute_mean_and_std([run.total("macs") for run in scored])
        is_split = group.kind == SPLIT
        points.append(TradeoffPoint(group.label, is_split, accuracy, traffic, macs, len(scored)))
    costs = [[-point.accuracy[0], point.traffic[0], point.macs[0]] for point in points]
    pairs = zip(points, find_undominated(np.array(costs)), strict=True)
    return [replace(point, is_pareto_optimal=is_optimal) for point, is_optimal in pairs]


def draw_tradeoff(name: str, groups: Sequence[RunGroup]) -> ReportFigure | None:
    """Draw accuracy against traffic, one bubble per group; None where nothing was sent."""
    points = compute_tradeoff_points(groups)
    if len(points) < 2 or not any(point.traffic[0] for point in points):
        return None
    figure, axes = make_figure(max(4.6, 0.2 * len(points) + 1.6))
    max_macs = max(point.macs[0] for point in points) or 1.0
    scale = MAX_AREA * min(1.0, 12 / len(points))

    def get_area(macs: float) -> float:
        return scale * macs / max_macs

    is_large = max(point.traffic[0] for point in points) >= 1e9
    unit, unit_name = (1e9, "GB") if is_large else (1e6, "MB")
    for point in points:
        _draw_bubble(axes, point, get_area(point.macs[0]), unit)
    _format_axes(axes, points, unit_name)
    _draw_legend(axes, points, get_area, max_macs)
    markers = [
        (point.traffic[0] / unit, point.accuracy[0], float(np.sqrt(get_area(point.macs[0]))))
        for point in points
    ]
    labels = [(point.label, "bold" if point.is_pareto_optimal else "normal") for point in points]
    place_labels(axes, markers, labels)
    optimal = ", ".join(point.label for point in points if point.is_pareto_optimal)
    values = "; ".join(
        f"{point.label}: {format_percent(point.accuracy[0])} for "
        f"{format_quantity(point.traffic[0], 'B')} and {format_quantity(point.macs[0], 'MACs')}"
        for point in points
    )
    return ReportFigure(
        f"trade-off{'-' + name.split()[0] if name else ''}",
        "Accuracy against traffic and compute" + (f": {name}" if name else ""),
        "Bubble chart of the last accuracy against bytes sent up and down, means over seeds "
        "with one standard deviation; the area of a bubble is the compute of the clients. "
        f"Pareto-optimal in all three (no other group is at least as good in each): {optimal}. "
        f"{values}.",
        figure,
        (
            "group", "accuracy", "standard deviation", "GB", "standard deviation of GB",
            "client GMACs", "seeds", "Pareto-optimal",
        ),
        [_format_row(point) for point in points],
        _conclude(points),
    )  # fmt: skip


def _conclude(points: list[TradeoffPoint]) -> str:
    """Say what the most accurate group costs, and what the cheapest good one saves."""
    best = max(points, key=lambda point: point.accuracy[0])
    near = [p for p in points if p.accuracy[0] >= best.accuracy[0] - CLOSE]
    cheapest = min(near, key=lambda point: point.traffic[0])
    text = f"{best.label} is the most accurate"
    if cheapest is best:
        return f"{text}, and none within a point of it sends less."
    return (
        f"{text}; {cheapest.label} is within a point of it with "
        f"{cheapest.traffic[0] / best.traffic[0]:.0%} of its bytes and "
        f"{cheapest.macs[0] / best.macs[0]:.0%} of its MACs."
    )


def _format_row(point: TradeoffPoint) -> tuple[object, ...]:
    numbers = (*point.accuracy, point.traffic[0] / 1e9, point.traffic[1] / 1e9, point.macs[0] / 1e9)
    rounded = (float(f"{number:.6g}") for number in numbers)
    return (point.label, *rounded, point.seeds, "yes" if point.is_pareto_optimal else "no")


def _draw_bubble(axes: Any, point: TradeoffPoint, area: float, unit: float) -> None:
    x, y = point.traffic[0] / unit, point.accuracy[0]
    if point.seeds > 1:
        axes.errorbar(
            x, y, xerr=point.traffic[1] / unit, yerr=point.accuracy[1], fmt="none",
            ecolor=PALE_COLOUR, elinewidth=0.9, capsize=2.5, zorder=2,
        )  # fmt: skip
    axes.scatter([x], [y], **_get_bubble_style(point.is_split, point.is_pareto_optimal, area))
    axes.scatter([x], [y], s=4, color=TEXT_COLOUR, zorder=4)  # visible even if the bubble is tiny


def _get_bubble_style(is_split: bool, is_optimal: bool, area: float) -> dict[str, Any]:
    """Return the style of a bubble: filled if Pareto-optimal, square if federated."""
    # matplotlib expects the area of the box around a marker
    box = area * 4 / np.pi if is_split else area
    style = {"marker": "o" if is_split else "s", "s": box, "zorder": 3}
    if is_optimal:
        filled = {"facecolor": FILL_COLOUR, "edgecolor": EDGE_COLOUR, "linewidth": 1.8}
        return style | filled | {"alpha": 0.85}
    hollow = {"facecolor": "none", "edgecolor": PALE_COLOUR, "linewidth": 1.1}
    return style | hollow | {"linestyle": (0, (3, 2))}


def _format_axes(axes: Any, points: list[TradeoffPoint], unit: str) -> None:
    tickers = require("matplotlib.ticker", "report")
    traffic = [point.traffic[0] for point in points]
    is_wide = min(traffic) > 0 and max(traffic) / min(traffic) > LOG_SCALE_RATIO
    if is_wide:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(tickers.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.14, y=0.14)
    axes.set_xlabel(f"{unit} sent, up and down" + (" (logarithmic)" if is_wide else ""))
    axes.set_ylabel("last test accuracy")
    axes.yaxis.set_major_formatter(tickers.PercentFormatter(1.0))


def _draw_legend(
    axes: Any, points: list[TradeoffPoint], get_area: Callable[[float], float], max_macs: float
) -> None:
    kinds = sorted({point.is_split for point in points})

    def make_handle(is_split: bool, is_optimal: bool, size: float, label: str) -> Any:
        return axes.scatter([], [], label=label, **_get_bubble_style(is_split, is_optimal, size))

    is_split = kinds[-1]
    handles = [
        make_handle(is_split, True, 60, "Pareto-optimal (name in bold)"),
        make_handle(is_split, False, 60, "another is better or equal in all"),
    ]
    if len(kinds) > 1:
        handles.append(make_handle(True, False, 60, "split"))
        handles.append(make_handle(False, False, 60, "federated"))
    handles += [
        make_handle(is_split, False, get_area(macs), format_quantity(macs, "MACs") + " of clients")
        for macs in (max_macs / 4, max_macs)
    ]
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False,
        borderpad=0.8, labelspacing=1.3, handletextpad=1.0, columnspacing=2.2,
    )  # fmt: skip
