"""Pictures of a search: fronts as they grow, vectors over layers, what dropping filters saves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pliant import atomic
from pliant.explore.front import FloatArray, front
from pliant.explore.table import Table
from pliant.extras import need


class Points(NamedTuple):
    """Costs and losses, both normalised, in the order in which they were measured."""

    name: str
    costs: FloatArray
    losses: FloatArray


def draw_fronts(path: Path, tried: Points, lines: Sequence[Points], stages: int = 4) -> Path:
    """Draw what was tried, its front at some stages, and lines to compare it with."""
    figure = _figure(6.4, 4.4)
    axes = figure.subplots()
    drawn = axes.scatter(
        tried.costs, tried.losses, s=6, c=np.arange(len(tried.costs)), cmap="Greys", linewidth=0
    )
    drawn.set_clim(-0.3 * len(tried.costs), len(tried.costs))
    for stage in range(1, stages + 1):
        count = max(1, len(tried.costs) * stage // stages)
        chosen = front(tried.costs[:count], tried.losses[:count])
        axes.step(
            tried.costs[chosen],
            tried.losses[chosen],
            where="post",
            linewidth=0.8,
            color=str(0.8 - 0.8 * stage / stages),
            label=f"front of the first {count}",
        )
    for line, colour in zip(lines, ("#c0392b", "#2c6fbb", "#2e8b57"), strict=False):
        order = np.argsort(line.costs)
        axes.plot(
            line.costs[order], line.losses[order], ".-", linewidth=1, color=colour, label=line.name
        )
    axes.set_xlabel("cost: 0 at the highest rates, 1 for the full network")
    axes.set_ylabel("loss of accuracy gain, normalised")
    axes.set_ylim(-0.25, 1.6)
    axes.legend(fontsize=7, frameon=False)
    return _saved(figure, path)


def draw_vectors(path: Path, table: Table) -> Path:
    """Draw the rates of a table: one row of the picture a site, the cost to the right."""
    rates = np.asarray(table.rates).T
    figure = _figure(7.0, 1.6 + 0.16 * len(rates))
    axes = figure.subplots()
    drawn = axes.imshow(rates, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0.0)
    places = np.linspace(0, len(table.shares) - 1, min(9, len(table.shares))).astype(int)
    axes.set_xticks(places, [f"{table.shares[place]:.2f}" for place in places])
    axes.set_xlabel("row, by its share of the full network's MACs")
    axes.set_ylabel("site")
    axes.yaxis.set_major_locator(
        need("matplotlib.ticker", "report").MaxNLocator(nbins=12, integer=True)
    )
    figure.colorbar(drawn, ax=axes, label="rate", pad=0.01)
    return _saved(figure, path)


def draw_costs(
    path: Path, dropped: FloatArray, macs: FloatArray, seconds: FloatArray, title: str = ""
) -> Path:
    """Draw MACs and measured time of a step against the share of filters that are dropped."""
    figure = _figure(5.4, 4.0)
    axes = figure.subplots()
    axes.plot(dropped, macs, ".", markersize=5, color="#2c6fbb", label="MACs")
    axes.plot(dropped, seconds, ".", markersize=5, color="#c0392b", label="step time, measured")
    axes.plot([0, 1], [1, 0], ":", linewidth=0.8, color="0.5")
    axes.set_xlim(0, 0.6)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("share of filters that are dropped")
    axes.set_ylabel("share of the full network's")
    axes.set_title(title, fontsize=8, loc="left")
    axes.legend(fontsize=8, frameon=False)
    return _saved(figure, path)


def draw_rates(
    path: Path,
    sites: Sequence[str],
    kinds: tuple[str, str],
    chosen: Mapping[str, Sequence[Sequence[float]]],
) -> Path:
    """Draw two vectors side by side for each title: which sites the one drops, which the other."""
    figure = _figure(1.8 + 1.9 * len(chosen), 1.2 + 0.2 * len(sites))
    places = np.arange(len(sites))
    for number, (title, vectors) in enumerate(chosen.items(), start=1):
        axes = figure.add_subplot(1, len(chosen), number)
        for shift, rates, colour, kind in zip(
            (-0.2, 0.2), vectors, ("#2c6fbb", "#c0392b"), kinds, strict=True
        ):
            axes.barh(places + shift, rates, 0.4, color=colour, label=kind)
        axes.set_yticks(places, sites if number == 1 else [""] * len(sites), fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("rate")
        axes.set_title(title, fontsize=8, loc="left")
    figure.axes[0].legend(fontsize=7, frameon=False)
    return _saved(figure, path)


def _figure(width: float, height: float) -> Any:
    figures = need("matplotlib.figure", "report")
    return figures.Figure(figsize=(width, height), layout="constrained")


def _saved(figure: Any, path: Path) -> Path:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with atomic.replacing(path) as file:
        figure.savefig(file, format=path.suffix.lstrip(".") or "png", dpi=130)
    return path
