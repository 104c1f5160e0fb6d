"""Draw Pareto fronts and rate vectors: of tables in files and configs, and of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pliant.analysis.runs import Floats, RunGroup
from pliant.analysis.style import (
    COLOURS,
    MARKERS,
    ReportFigure,
    draw_heat_map,
    get_line_style,
    make_figure,
)
from pliant.nn.table_file import load_table, read_provenance
from pliant.storage.run_dir import TABLE_FILE
from pliant.table_search.pareto import find_pareto_front
from pliant.value import encode

EQUAL_DASH = (0, (1.5, 2))
MAX_TICKED_SITES = 60  # beyond that, matplotlib chooses the ticks


Sides = tuple[int | None, ...]  # in pixels; None: as they are


@dataclass(frozen=True, eq=False)
class RateVectors:
    """A table of rate vectors: rates by site, cost, and gain in a short training."""

    label: str
    slug: str
    rates: Floats  # (row, site)
    shares: Floats
    gains: Floats  # empty where no search measured them
    sides: Sides = ()  # of the images; empty: as they are
    # (vector, 2): shares and gains with the same rate at all sites; empty: not measured
    equal_rates: Floats = field(default_factory=lambda: np.zeros((0, 2)))


def make_rate_vectors(
    label: str, slug: str, table: Mapping[str, Any], equal_rates: Sequence[Any] = ()
) -> RateVectors:
    """Take the columns of a table from plain data."""
    columns = (table["rates"], table["shares"], table.get("gains", ()))
    rates, shares, gains = (np.asarray(column, np.float64) for column in columns)
    sides, points = tuple(table.get("sides", ())), np.asarray(equal_rates, np.float64)
    return RateVectors(label, slug, rates, shares, gains, sides, points.reshape(-1, 2))


def _split_stages(
    label: str, slug: str, table: Mapping[str, Any], equal_rates: Sequence[Any] = ()
) -> list[RateVectors]:
    """Return the rate vectors of each stage of a table, with the equal rates of each."""
    stages = table.get("stages") or ()
    if not stages:
        return [make_rate_vectors(label, slug, table, *equal_rates[:1])]
    names = [name for name in ("rates", "shares", "gains", "sides") if table.get(name)]
    vectors = []
    for number, stage in enumerate(sorted(set(stages)), start=1):
        rows = [row for row, row_stage in enumerate(stages) if row_stage == stage]
        part = {name: [table[name][row] for row in rows] for name in names}
        text, equal = f"{label}, stage {stage:g}", equal_rates[number - 1 : number]
        vectors.append(make_rate_vectors(text, f"{slug}-{number}", part, *equal))
    return vectors


def load_table_file(path: Path, label: str, slug: str) -> list[RateVectors]:
    """Read a table file: one result per stage, with the equal rates that its search measured."""
    provenance = read_provenance(path)
    equal_rates = provenance.get("equal_rates", ()) if isinstance(provenance, dict) else ()
    return _split_stages(label, slug, encode(load_table(path)), equal_rates)


def load_rate_vectors(paths: Sequence[Path], groups: Sequence[RunGroup]) -> list[RateVectors]:
    """Read the tables below these paths and in the configs of runs, each once."""
    files = sorted({file for path in paths if path.is_dir() for file in path.rglob(TABLE_FILE)})
    tables: list[RateVectors] = []
    for index, path in enumerate(files):
        tables += load_table_file(path, path.parent.name, str(index))
    for group in groups:
        config = group.first_run.config.get("method", {}).get("table")
        if isinstance(config, dict) and config.get("rates"):
            tables += _split_stages(group.label, f"run-{len(tables)}", config)
    unique: list[RateVectors] = []
    for table in tables:
        if not any(_are_equal(table, other) for other in unique):
            unique.append(table)
    return unique


def _are_equal(table: RateVectors, other: RateVectors) -> bool:
    columns = ((table.rates, other.rates), (table.gains, other.gains))
    return table.sides == other.sides and all(np.array_equal(*pair) for pair in columns)


def _mark_sides(axes: Any, lines: Sequence[tuple[Floats, Floats, Sides]]) -> None:
    """Mark the points of lines by the side of their images."""
    all_sides = {side for _, _, sides in lines for side in sides}
    for index, side in enumerate(sorted(all_sides, key=lambda side: side or np.inf)):
        points = [
            (cost, value)
            for costs, values, sides in lines
            for cost, value, point_side in zip(costs, values, sides, strict=bool(sides))
            if point_side == side
        ]
        style = {"marker": MARKERS[index % len(MARKERS)], "color": COLOURS[index % len(COLOURS)]}
        label = f"side {side}" if side else "full side"
        axes.scatter(*np.transpose(points), s=24, zorder=3, label=label, **style)


def draw_pareto_front(tables: Sequence[RateVectors]) -> ReportFigure | None:
    """Draw the gain of each table row against its cost."""
    measured = [table for table in tables if len(table.gains)]
    if not measured:
        return None
    figure, axes = make_figure(4.0)
    rows: list[tuple[object, ...]] = []
    for index, table in enumerate(measured):
        style = get_line_style(index) | {"label": table.label, "drawstyle": "steps-post"}
        axes.plot(table.shares, table.gains, **style)
        for row, pair in enumerate(zip(table.shares, table.gains, strict=True)):
            rows.append((table.label, row, *(round(float(value), 6) for value in pair)))
        if len(table.equal_rates):
            label = f"{table.label}, equal rates" if len(measured) > 1 else "equal rates"
            line = {"linestyle": EQUAL_DASH, "linewidth": 1.2, "color": style["color"]}
            axes.plot(*table.equal_rates.T, **line, marker="x", markersize=5, label=label)
            for pair in table.equal_rates.tolist():
                rows.append((label, "", *(round(value, 6) for value in pair)))
    _mark_sides(axes, [(table.shares, table.gains, table.sides) for table in measured])
    axes.set_xlabel("expected MACs of a training step, share of the full network's")
    axes.set_ylabel("gain of accuracy in a short training")
    axes.legend(loc="lower right", handlelength=4.0, frameon=False)
    summary = "; ".join(
        f"{table.label}: {len(table.shares)} rows from {table.shares[0]:.2f} of the cost "
        f"(gain {table.gains[0]:.3f}) to {table.shares[-1]:.2f} (gain {table.gains[-1]:.3f})"
        for table in measured
    )
    text = f"Step chart of gain against cost. {summary}."
    header = ("table", "row", "cost share", "gain")
    return ReportFigure(
        "pareto", "Pareto front", text, figure, header, rows, _conclude_front(measured[0])
    )


def _conclude_front(table: RateVectors) -> str:
    """Say which cost suffices for nine tenths of the gain, and what equal rates gain at it."""
    full = table.gains[-1]
    if full <= 0:
        return f"{table.label}: the full network gained nothing in a short training."
    enough = next(row for row, gain in enumerate(table.gains) if gain >= 0.9 * full)
    text = (
        f"{table.label}: steps of {table.shares[enough]:.0%} of the cost reach "
        f"{table.gains[enough] / full:.0%} of the full network's gain in a short training"
    )
    if not len(table.equal_rates):
        return f"{text}; equal rates for all sites were not measured."
    shares, gains = table.equal_rates[np.argsort(table.equal_rates[:, 0])].T
    equal = float(np.interp(table.shares[enough], shares, gains))
    return f"{text}, equal rates for all sites {equal / full:.0%}."


class CostLossPoints(NamedTuple):
    """Normalised costs and losses in the order of measurement."""

    name: str
    costs: Floats
    losses: Floats
    sides: Sides = ()  # of the images, to mark points


def normalise_front(table: RateVectors) -> list[CostLossPoints]:
    """Return a table and its equal rates as costs and losses between its two ends."""
    cheapest, full = table.shares[0], table.shares[-1]
    spread = max(table.gains[-1] - table.gains[0], 1e-9)

    def normalise(name: str, shares: Floats, gains: Floats, sides: Sides = ()) -> CostLossPoints:
        costs = (shares - cheapest) / (full - cheapest)
        return CostLossPoints(name, costs, (table.gains[-1] - gains) / spread, sides)

    lines = [normalise("table, at fresh seeds", table.shares, table.gains, table.sides)]
    if len(table.equal_rates):
        lines.append(normalise("equal rates, at fresh seeds", *table.equal_rates.T))
    return lines


def draw_search_fronts(
    trials: CostLossPoints, references: Sequence[CostLossPoints], stages: int = 4
) -> ReportFigure:
    """Draw all trials of a search, their front at several stages, and fronts to compare with."""
    figure, axes = make_figure(4.6)
    total = len(trials.costs)
    cloud = axes.scatter(
        trials.costs, trials.losses, s=6, c=np.arange(total), cmap="Greys", linewidth=0
    )
    cloud.set_clim(-0.3 * total, total)
    for stage in range(1, stages + 1):
        count = max(1, total * stage // stages)
        front = find_pareto_front(trials.costs[:count], trials.losses[:count])
        axes.step(
            trials.costs[front], trials.losses[front], where="post", linewidth=0.8,
            color=str(0.8 - 0.8 * stage / stages), label=f"front of the first {count}",
        )  # fmt: skip
    for index, line in enumerate(references):
        order = np.argsort(line.costs)
        style = get_line_style(index) | {"label": line.name}
        axes.plot(line.costs[order], line.losses[order], **style)
    _mark_sides(axes, [(line.costs, line.losses, line.sides) for line in references])
    axes.set_xlabel("cost: 0 for the cheapest step, 1 for the full one")
    axes.set_ylabel("loss of accuracy gain, normalised")
    axes.set_ylim(-0.25, 1.6)
    axes.legend(fontsize=8, frameon=False)
    text = f"Scatter plot of {total} short trainings, with their Pareto front."
    rows = list(zip(trials.costs, trials.losses, strict=True))
    return ReportFigure("front", "Front of a search", text, figure, ("cost", "loss"), rows)


def draw_rate_vectors(table: RateVectors) -> ReportFigure:
    """Draw the rates of a table: one row per vector, one column per site."""
    rows, sites = table.rates.shape
    figure, axes = make_figure(3.6)
    vmax = max(0.5, float(table.rates.max()))
    image = draw_heat_map(axes, table.rates, vmin=0.0, vmax=vmax)
    axes.set_xlabel("site, from input to output")
    axes.set_ylabel("row, from cheap to full")
    if sites <= MAX_TICKED_SITES:
        axes.set_xticks(range(0, sites, max(1, sites // 16)))
    ticks = range(0, rows, max(1, rows // 8))
    sides = [f", side {side or 'full'}" for side in table.sides] or [""] * rows
    axes.set_yticks(ticks, [f"{row} ({table.shares[row]:.0%}{sides[row]})" for row in ticks])
    figure.colorbar(image, ax=axes, pad=0.01).set_label("dropout rate")
    means = table.rates.mean(axis=0)
    high, low = int(means.argmax()), int(means.argmin())
    return ReportFigure(
        f"vectors-{table.slug}",
        f"Dropout vectors: {table.label}",
        f"Heat map of {rows} vectors of dropout rates over {sites} sites, darker where more is "
        f"dropped. Averaged over rows, site {high} drops most ({means[high]:.2f}) and site "
        f"{low} least ({means[low]:.2f}).",
        figure,
        ("row", "cost share", *(f"site {site}" for site in range(sites))),
        [
            (row, round(float(share), 6), *(round(float(rate), 4) for rate in vector))
            for row, (share, vector) in enumerate(zip(table.shares, table.rates, strict=True))
        ],
        f"Site {high} drops most ({means[high]:.2f} on average), site {low} least "
        f"({means[low]:.2f}).",
    )
