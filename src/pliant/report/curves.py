"""Curves of accuracy against rounds, virtual seconds, MACs and bytes, with spread over seeds."""

from dataclasses import dataclass

import numpy as np

from pliant.extras import need
from pliant.report.history import Floats, History, Sample
from pliant.report.look import Drawn, canvas, line, percent, short

AXES = {
    "rounds": ("rounds", "rounds"),
    "seconds": ("virtual seconds", "seconds"),
    "macs": ("MACs spent by all devices", "MACs"),
    "bytes": ("bytes sent, up and down", "bytes"),
}
POINTS = 200  # of a curve: more than a figure can show


@dataclass(frozen=True, eq=False)
class Curve:
    """The mean over seeds and its standard deviation."""

    label: str
    x: Floats
    mean: Floats
    spread: Floats
    seeds: int


def curve(sample: Sample, axis: str, value: str = "accuracy") -> Curve | None:
    """Return a group's curve over what all its seeds have come to; None without an evaluation."""
    seen = [_points(history, axis, value) for history in sample.histories]
    seen = [(x, y) for x, y in seen if len(x)]
    if not seen:
        return None
    low, high = max(x[0] for x, _ in seen), min(x[-1] for x, _ in seen)
    grid = np.unique(np.concatenate([x for x, _ in seen]))
    grid = grid[(grid >= low) & (grid <= high)]
    if not len(grid):  # the seeds have no stretch in common yet
        return None
    if len(grid) > POINTS:
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, POINTS).astype(int))]
    values = np.stack([np.interp(grid, x, y) for x, y in seen])
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(grid))
    return Curve(sample.label, grid, values.mean(axis=0), spread, len(values))


def _points(history: History, axis: str, value: str) -> tuple[Floats, Floats]:
    kept = np.isfinite(history[value]) & np.isfinite(history.axis(axis))
    return history.axis(axis)[kept], history[value][kept]


def draw_curves(samples: list[Sample], axis: str) -> Drawn | None:
    """Draw accuracy against one axis; None where nothing was evaluated."""
    tickers = need("matplotlib.ticker", "report")
    found = [(at, curve(sample, axis)) for at, sample in enumerate(samples)]
    curves = [(at, one) for at, one in found if one is not None]
    if not curves:
        return None
    label, unit = AXES[axis]
    figure, axes = canvas(max(3.6, 0.24 * len(curves) + 0.6))
    rows: list[tuple[object, ...]] = []
    for at, one in curves:
        style = line(at) | {"markevery": (at % 3, max(1, len(one.x) // 8))}
        axes.plot(one.x, one.mean, label=one.label, **style)
        if one.seeds > 1:
            low, high = one.mean - one.spread, one.mean + one.spread
            axes.fill_between(one.x, low, high, color=style["color"], alpha=0.13, linewidth=0)
        rows += [
            (one.label, float(f"{x:.6g}"), float(f"{y:.6g}"), float(f"{s:.6g}"), one.seeds)
            for x, y, s in zip(one.x, one.mean, one.spread, strict=True)
        ]
    axes.set_xlabel(label)
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(tickers.PercentFormatter(1.0, decimals=0))
    if axis != "seconds":
        axes.xaxis.set_major_formatter(tickers.EngFormatter(sep=" "))
    if axis == "rounds":
        axes.xaxis.set_major_locator(tickers.MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(tickers.ScalarFormatter())
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5, handlelength=4.0, frameon=False
    )
    ends = "; ".join(
        f"{one.label}: {percent(one.mean[-1])} after {short(one.x[-1])} {unit}" for _, one in curves
    )
    return Drawn(
        f"accuracy-{axis}",
        f"Accuracy against {label}",
        f"Line chart of test accuracy against {label}, mean over seeds with one standard "
        f"deviation on either side. {ends}.",
        figure,
        ("group", unit, "accuracy", "standard deviation", "seeds"),
        rows,
    )
