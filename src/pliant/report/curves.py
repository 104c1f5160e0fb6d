"""Curves of accuracy against rounds, seconds, MACs and bytes, with spread over seeds."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.extras import need
from pliant.report.history import Floats, History, Sample
from pliant.report.kinds import kind, shared
from pliant.report.look import Drawn, canvas, line, percent, short

AXES = {
    "rounds": ("rounds", "rounds"),
    "seconds": ("seconds", "seconds"),
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


_Numbered = tuple[int, str, Curve]  # with its number in the report and its kind


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
    """Draw accuracy against one axis; None where nothing was evaluated.

    Groups that cannot be compared have panels of their own.
    """
    panels = []
    for share in shared(samples):
        found = [(at, kind(sample), curve(sample, axis)) for at, sample in share.members]
        drawable = [(at, of, one) for at, of, one in found if one is not None]
        if drawable:
            panels.append((share.name, drawable))
    if not panels:
        return None
    label, unit = AXES[axis]
    heights = [max(3.4, 0.24 * len(drawable) + 1.0) for _, drawable in panels]
    figure, made = canvas(sum(heights), heights)
    rows: list[tuple[object, ...]] = []
    for axes, (name, drawable) in zip(np.atleast_1d(made), panels, strict=True):
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        rows += _panel(axes, axis, drawable)
    ends = "; ".join(
        f"{one.label}: {percent(one.mean[-1])} after {short(one.x[-1])} {unit}"
        for _, drawable in panels
        for _, _, one in drawable
    )
    apart = " A panel each for federated and split methods, which had other data."
    return Drawn(
        f"accuracy-{axis}",
        f"Accuracy against {label}",
        f"Line chart of test accuracy against {label}, mean over seeds with one standard "
        f"deviation on either side.{apart if len(panels) > 1 else ''} {ends}.",
        figure,
        ("group", unit, "accuracy", "standard deviation", "seeds"),
        rows,
    )


def _panel(axes: Any, axis: str, drawable: list[_Numbered]) -> list[tuple[object, ...]]:
    """Draw the curves that are compared with one another, and return their numbers."""
    tickers = need("matplotlib.ticker", "report")
    rows: list[tuple[object, ...]] = []
    kinds = dict.fromkeys(of for _, of, _ in drawable)
    entries: list[tuple[Any, str]] = []
    for heading in kinds:
        if len(kinds) > 1:
            (nothing,) = axes.plot([], [], linestyle="none")
            entries.append((nothing, heading))
        for at, of, one in drawable:
            if of != heading:
                continue
            every = max(1, len(one.x) // 8)
            style = line(at) | {"markevery": (at % min(3, every), every)}
            (drawn,) = axes.plot(one.x, one.mean, **style)
            entries.append((drawn, one.label))
            if one.seeds > 1:
                low, high = one.mean - one.spread, one.mean + one.spread
                axes.fill_between(one.x, low, high, color=style["color"], alpha=0.13, linewidth=0)
            rows += [
                (one.label, float(f"{x:.6g}"), float(f"{y:.6g}"), float(f"{s:.6g}"), one.seeds)
                for x, y, s in zip(one.x, one.mean, one.spread, strict=True)
            ]
    axes.set_xlabel(AXES[axis][0])
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(tickers.PercentFormatter(1.0))
    if axis != "seconds":
        axes.xaxis.set_major_formatter(tickers.EngFormatter(sep=" "))
    if axis == "rounds":
        axes.xaxis.set_major_locator(tickers.MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(tickers.ScalarFormatter())
    legend = axes.legend(
        *zip(*entries, strict=True), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5,
        handlelength=4.0, frameon=False,
    )  # fmt: skip
    for text in legend.get_texts():
        if text.get_text() in kinds and len(kinds) > 1:
            text.set_fontweight("bold")
    return rows
