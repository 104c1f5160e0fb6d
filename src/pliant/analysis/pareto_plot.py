"""Draw Pareto fronts and their rate vectors, from tables in files and in configs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pliant.analysis.history import Floats
from pliant.analysis.runs import RunGroup
from pliant.analysis.style import HEATMAP_COLOURS, ReportFigure, get_line_style, make_figure

TABLE_FILE = "table.safetensors"
MAX_TICKED_SITES = 60  # beyond that, matplotlib chooses the ticks


@dataclass(frozen=True, eq=False)
class RateVectors:
    """A table of rate vectors: rates by site, cost, and gain in a short training."""

    label: str
    slug: str
    rates: Floats  # (row, site)
    shares: Floats
    gains: Floats  # empty where no search measured them


def load_rate_vectors(paths: Sequence[Path], groups: Sequence[RunGroup]) -> list[RateVectors]:
    """Read the tables below these paths and in the configs of runs, each once."""
    files = sorted({file for path in paths for file in _find_tables(path)})
    tables = [_load_from_file(path, index) for index, path in enumerate(files)]
    for group in groups:
        config = group.first_run.config.get("method", {}).get("table")
        if isinstance(config, dict) and config.get("rates"):
            tables.append(_load_from_config(group.label, f"run-{len(tables)}", config))
    unique: list[RateVectors] = []
    for table in tables:
        if not any(np.array_equal(table.rates, other.rates) for other in unique):
            unique.append(table)
    return unique


def _find_tables(path: Path) -> list[Path]:
    return [] if not path.is_dir() else [*path.rglob(TABLE_FILE)]


def _load_from_file(path: Path, index: int) -> RateVectors:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        rates, shares = tensors["rates"], tensors["shares"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: expected a pliant table ({error})") from None
    gains = tensors.get("gains", np.zeros(0))
    return RateVectors(
        path.parent.name,
        f"{index}",
        rates.astype(np.float64),
        shares.astype(np.float64),
        gains.astype(np.float64),
    )


def _load_from_config(label: str, slug: str, config: dict[str, Any]) -> RateVectors:
    columns = [np.array(config.get(name, ()), np.float64) for name in ("rates", "shares", "gains")]
    return RateVectors(label, slug, columns[0], columns[1], columns[2])


def draw_pareto_front(tables: Sequence[RateVectors]) -> ReportFigure | None:
    """Draw the gain of each table row against its cost."""
    measured = [table for table in tables if len(table.gains)]
    if not measured:
        return None
    figure, axes = make_figure(4.0)
    rows: list[tuple[object, ...]] = []
    for index, table in enumerate(measured):
        axes.plot(
            table.shares,
            table.gains,
            label=table.label,
            drawstyle="steps-post",
            **get_line_style(index),
        )
        pairs = enumerate(zip(table.shares, table.gains, strict=True))
        rows += [
            (table.label, row, round(float(x), 6), round(float(y), 6)) for row, (x, y) in pairs
        ]
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
    return ReportFigure("pareto", "Pareto front", text, figure, header, rows)


def draw_rate_vectors(table: RateVectors) -> ReportFigure:
    """Draw the rates of a table: one row per vector, one column per site."""
    rows, sites = table.rates.shape
    figure, axes = make_figure(3.6)
    image = axes.imshow(
        table.rates, aspect="auto", origin="lower", cmap=HEATMAP_COLOURS, vmin=0.0,
        vmax=max(0.5, float(table.rates.max())), interpolation="nearest",
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set_xlabel("site, from input to output")
    axes.set_ylabel("row, from cheap to full")
    if sites <= MAX_TICKED_SITES:
        axes.set_xticks(range(0, sites, max(1, sites // 16)))
    axes.set_yticks(*_make_row_ticks(table))
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
    )


def _make_row_ticks(table: RateVectors) -> tuple[list[int], list[str]]:
    step = max(1, len(table.shares) // 8)
    rows = list(range(0, len(table.shares), step))
    return rows, [f"{row} ({table.shares[row]:.0%})" for row in rows]
