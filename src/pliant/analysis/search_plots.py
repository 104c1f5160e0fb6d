"""Draw a search: the growing front, rates by layer, and the cost of training steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pliant.extras import require
from pliant.nn.pareto_table import ParetoTable
from pliant.storage import atomic
from pliant.table_search.pareto import FloatArray, find_pareto_front


class CostLossPoints(NamedTuple):
    """Normalised costs and losses in the order of measurement."""

    name: str
    costs: FloatArray
    losses: FloatArray


def draw_search_fronts(
    path: Path, trials: CostLossPoints, references: Sequence[CostLossPoints], stages: int = 4
) -> Path:
    """Draw all trials, their front at several stages, and references to compare with."""
    figure = _make_figure(6.4, 4.4)
    axes = figure.subplots()
    cloud = axes.scatter(
        trials.costs, trials.losses, s=6, c=np.arange(len(trials.costs)), cmap="Greys", linewidth=0
    )
    cloud.set_clim(-0.3 * len(trials.costs), len(trials.costs))
    for stage in range(1, stages + 1):
        count = max(1, len(trials.costs) * stage // stages)
        front = find_pareto_front(trials.costs[:count], trials.losses[:count])
        axes.step(
            trials.costs[front],
            trials.losses[front],
            where="post",
            linewidth=0.8,
            color=str(0.8 - 0.8 * stage / stages),
            label=f"front of the first {count}",
        )
    for line, colour in zip(references, ("#c0392b", "#2c6fbb", "#2e8b57"), strict=False):
        order = np.argsort(line.costs)
        axes.plot(
            line.costs[order], line.losses[order], ".-", linewidth=1, color=colour, label=line.name
        )
    axes.set_xlabel("cost: 0 at the highest rates, 1 for the full network")
    axes.set_ylabel("loss of accuracy gain, normalised")
    axes.set_ylim(-0.25, 1.6)
    axes.legend(fontsize=7, frameon=False)
    return _save_figure(figure, path)


def draw_table_rates(path: Path, table: ParetoTable) -> Path:
    """Draw the rates of a table: one row per site, cost rising to the right."""
    rates = np.asarray(table.rates).T
    figure = _make_figure(7.0, 1.6 + 0.16 * len(rates))
    axes = figure.subplots()
    image = axes.imshow(rates, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0.0)
    ticks = np.linspace(0, len(table.shares) - 1, min(9, len(table.shares))).astype(int)
    axes.set_xticks(ticks, [f"{table.shares[row]:.2f}" for row in ticks])
    axes.set_xlabel("row, by its share of the full network's MACs")
    axes.set_ylabel("site")
    axes.yaxis.set_major_locator(
        require("matplotlib.ticker", "report").MaxNLocator(nbins=12, integer=True)
    )
    figure.colorbar(image, ax=axes, label="rate", pad=0.01)
    return _save_figure(figure, path)


def draw_step_costs(
    path: Path, dropped_shares: FloatArray, macs: FloatArray, seconds: FloatArray, title: str = ""
) -> Path:
    """Draw MACs and measured time of a step against the share of dropped filters."""
    figure = _make_figure(5.4, 4.0)
    axes = figure.subplots()
    axes.plot(dropped_shares, macs, ".", markersize=5, color="#2c6fbb", label="MACs")
    axes.plot(
        dropped_shares, seconds, ".", markersize=5, color="#c0392b", label="step time, measured"
    )
    axes.plot([0, 1], [1, 0], ":", linewidth=0.8, color="0.5")
    axes.set_xlim(0, 0.6)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("share of dropped filters")
    axes.set_ylabel("share of the full network's")
    axes.set_title(title, fontsize=8, loc="left")
    axes.legend(fontsize=8, frameon=False)
    return _save_figure(figure, path)


def draw_rate_comparison(
    path: Path,
    sites: Sequence[str],
    names: tuple[str, str],
    vectors_by_title: Mapping[str, Sequence[Sequence[float]]],
) -> Path:
    """Draw the rates of two vectors side by side, one panel per title."""
    figure = _make_figure(1.8 + 1.9 * len(vectors_by_title), 1.2 + 0.2 * len(sites))
    positions = np.arange(len(sites))
    for number, (title, vectors) in enumerate(vectors_by_title.items(), start=1):
        axes = figure.add_subplot(1, len(vectors_by_title), number)
        for shift, rates, colour, name in zip(
            (-0.2, 0.2), vectors, ("#2c6fbb", "#c0392b"), names, strict=True
        ):
            axes.barh(positions + shift, rates, 0.4, color=colour, label=name)
        axes.set_yticks(positions, sites if number == 1 else [""] * len(sites), fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("rate")
        axes.set_title(title, fontsize=8, loc="left")
    figure.axes[0].legend(fontsize=7, frameon=False)
    return _save_figure(figure, path)


def _make_figure(width: float, height: float) -> Any:
    figures = require("matplotlib.figure", "report")
    return figures.Figure(figsize=(width, height), layout="constrained")


def _save_figure(figure: Any, path: Path) -> Path:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with atomic.replace_file(path) as file:
        figure.savefig(file, format=path.suffix.lstrip(".") or "png", dpi=130)
    return path
