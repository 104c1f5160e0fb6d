"""Draw accuracy against rounds, seconds, MACs and bytes, with the spread over seeds."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from pliant.analysis.runs import Floats, RunFolder, RunGroup, group_comparable
from pliant.analysis.style import (
    ReportFigure,
    format_percent,
    format_short,
    get_line_style,
    make_figure,
)
from pliant.analysis.summary import EQUAL_TIME
from pliant.extras import require

AXES = {
    "rounds": ("rounds", "rounds"),
    "seconds": ("seconds", "seconds"),
    "macs": ("MACs spent by all devices", "MACs"),
    "bytes": ("bytes sent, up and down", "bytes"),
}
MAX_POINTS = 200  # per curve: more than a figure can show


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """The mean over a group's seeds and its standard deviation."""

    group: RunGroup
    x: Floats
    mean: Floats
    std: Floats
    seeds: int


def compute_learning_curve(group: RunGroup, axis: str) -> LearningCurve | None:
    """Return a group's curve over the range that all its seeds cover; None without evaluations."""
    curves = [_select_points(run, axis) for run in group.runs]
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return None
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= low) & (grid <= high)]
    if not len(grid):  # the seeds do not overlap yet
        return None
    if len(grid) > MAX_POINTS:
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, MAX_POINTS).astype(int))]
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(grid))
    return LearningCurve(group, grid, values.mean(axis=0), std, len(values))


def _select_points(run: RunFolder, axis: str) -> tuple[Floats, Floats]:
    x, y = run.axis(axis), run["accuracy"]
    is_known = np.isfinite(y) & np.isfinite(x)
    return x[is_known], y[is_known]


def draw_learning_curves(groups: list[RunGroup], axis: str) -> ReportFigure | None:
    """Draw accuracy against one axis; None where nothing was evaluated.

    Groups that cannot be compared have separate panels.
    """
    panels: dict[str, list[LearningCurve]] = {}
    for name, members in group_comparable(groups).items():
        curves = list(filter(None, (compute_learning_curve(group, axis) for group in members)))
        if curves:
            panels[name] = curves
    if not panels:
        return None
    label, unit = AXES[axis]
    if axis == "rounds" and any(group.first_run.is_asynchronous for group in groups):
        label += ", or versions of asynchronous runs"
    heights = [max(3.4, 0.24 * len(curves) + 1.0) for curves in panels.values()]
    figure, all_axes = make_figure(sum(heights), heights)
    rows: list[tuple[object, ...]] = []
    for axes, (name, curves) in zip(np.atleast_1d(all_axes), panels.items(), strict=True):
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        rows += _draw_panel(axes, axis, curves)
        axes.set_xlabel(label)
    last_values = "; ".join(
        f"{curve.group.label}: {format_percent(curve.mean[-1])} "
        f"after {format_short(curve.x[-1])} {unit}"
        for curve in chain(*panels.values())
    )
    note = " Federated and split methods used different data and have separate panels."
    return ReportFigure(
        f"accuracy-{axis}",
        f"Accuracy against {label}",
        f"Line chart of test accuracy against {label}, mean over seeds with one standard "
        f"deviation on either side.{note if len(panels) > 1 else ''} {last_values}.",
        figure,
        ("group", unit, "accuracy", "standard deviation", "seeds"),
        rows,
        " ".join(_conclude(curves, axis) for curves in panels.values()),
    )


def _conclude(curves: list[LearningCurve], axis: str) -> str:
    """Say which group is best where the shortest curve ends, as the summary's table does."""
    end = min(curve.x[-1] for curve in curves)
    longest = max(curve.x[-1] for curve in curves)
    limit = longest if longest <= (1 + EQUAL_TIME) * end else end
    known = [(*accuracy, c) for c in curves if (accuracy := _find_accuracy(c, axis, limit))]
    (mean, std, best), *others = sorted(known, key=lambda item: -item[0])
    unit = AXES[axis][1].removesuffix("s" if end == 1 else "")
    text = f"After {format_short(end)} {unit}, {best.group.label} has {format_percent(mean)}"
    if not others:
        return f"{text}{'; the others are evaluated later' if len(curves) > 1 else ''}."
    second, second_std, rival = others[0]
    gap = 100 * (mean - second)
    text += f", the most; {rival.group.label} follows {gap:.1f} points behind"
    if best.seeds > 1 and 100 * max(std, second_std) >= gap:
        text += ", within the spread over seeds"
    return f"{text}."


def _find_accuracy(curve: LearningCurve, axis: str, end: float) -> tuple[float, float] | None:
    """Return mean and deviation over seeds of the last evaluation up to an end; None without."""
    points = (_select_points(run, axis) for run in curve.group.runs)
    known = [y[x <= (1 + 1e-9) * end] for x, y in points if len(x)]
    if not all(map(len, known)):
        return None
    last = [float(accuracies[-1]) for accuracies in known]
    return float(np.mean(last)), float(np.std(last, ddof=1)) if len(last) > 1 else 0.0


def _draw_panel(axes: Any, axis: str, curves: list[LearningCurve]) -> list[tuple[object, ...]]:
    """Draw comparable curves and return their numbers."""
    rows: list[tuple[object, ...]] = []
    kinds = dict.fromkeys(curve.group.kind for curve in curves)
    entries: list[tuple[Any, str]] = []
    for heading in kinds:
        if len(kinds) > 1:
            (blank,) = axes.plot([], [], linestyle="none")
            entries.append((blank, heading))
        for curve in curves:
            if curve.group.kind != heading:
                continue
            index = curve.group.index
            every = max(1, len(curve.x) // 8)
            style = get_line_style(index) | {"markevery": (index % min(3, every), every)}
            (line,) = axes.plot(curve.x, curve.mean, **style)
            entries.append((line, curve.group.label))
            if curve.seeds > 1:
                low, high = curve.mean - curve.std, curve.mean + curve.std
                axes.fill_between(curve.x, low, high, color=style["color"], alpha=0.13, linewidth=0)
            for values in zip(curve.x, curve.mean, curve.std, strict=True):
                rounded = (float(f"{value:.6g}") for value in values)
                rows.append((curve.group.label, *rounded, curve.seeds))
    _format_axes(axes, axis)
    _zoom_on_finish(axes, curves)
    legend = axes.legend(
        *zip(*entries, strict=True), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5,
        handlelength=4.0, frameon=False,
    )  # fmt: skip
    for text in legend.get_texts():
        if text.get_text() in kinds and len(kinds) > 1:
            text.set_fontweight("bold")
    return rows


def _zoom_on_finish(axes: Any, curves: list[LearningCurve]) -> None:
    """Cut off the start of the rise, where curves differ least, and mark the shortest curve's end.

    Accuracies from a quarter of the common range on stay visible.
    """
    end, last = (choose(curve.x[-1] for curve in curves) for choose in (min, max))
    low = min(np.interp(end / 4, c.x, c.mean - c.std) for c in curves)
    high = max((c.mean + c.std).max() for c in curves)
    if high > low:
        margin = 0.05 * (high - low)
        axes.set_ylim(max(0.0, low - margin), min(1.0, high + margin))
    if last > 1.02 * end:
        axes.axvline(end, color="#66717d", linewidth=0.9, linestyle=(0, (4, 3)))


def _format_axes(axes: Any, axis: str) -> None:
    tickers = require("matplotlib.ticker", "report")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(tickers.PercentFormatter(1.0))
    if axis != "seconds":
        axes.xaxis.set_major_formatter(tickers.EngFormatter(sep=" "))
    if axis == "rounds":
        axes.xaxis.set_major_locator(tickers.MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(tickers.ScalarFormatter())
