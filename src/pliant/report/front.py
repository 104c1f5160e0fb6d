"""Pareto fronts and the rate vectors on them, from tables in files and in configs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pliant.report.history import Floats
from pliant.report.look import SHADES, Drawn, canvas, line
from pliant.report.runs import Group

TABLE = "table.safetensors"
SITES = 60  # more sites than that have no ticks of their own


@dataclass(frozen=True, eq=False)
class Vectors:
    """A table of rate vectors: costs, rates by site, and what each gains in a short training."""

    label: str
    slug: str
    rates: Floats  # (row, site)
    shares: Floats
    gains: Floats  # empty where no search has measured them


def load_vectors(paths: Sequence[Path], groups: Sequence[Group]) -> list[Vectors]:
    """Read the tables below these paths and those inside the configs of runs, each once."""
    files = sorted({found for path in paths for found in _tables(path)})
    found = [_from_file(path, number) for number, path in enumerate(files)]
    for group in groups:
        table = group.first.config.get("method", {}).get("table")
        if isinstance(table, dict) and table.get("rates"):
            found.append(_from_config(group.label, f"run-{len(found)}", table))
    kept: list[Vectors] = []
    for one in found:
        if not any(np.array_equal(one.rates, other.rates) for other in kept):
            kept.append(one)
    return kept


def _tables(path: Path) -> list[Path]:
    return [] if not path.is_dir() else [*path.rglob(TABLE)]


def _from_file(path: Path, number: int) -> Vectors:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        rates, shares = tensors["rates"], tensors["shares"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: expected a table of pliant ({error})") from None
    gains = tensors.get("gains", np.zeros(0))
    return Vectors(
        path.parent.name,
        f"{number}",
        rates.astype(np.float64),
        shares.astype(np.float64),
        gains.astype(np.float64),
    )


def _from_config(label: str, slug: str, table: dict[str, Any]) -> Vectors:
    columns = [np.array(table.get(name, ()), np.float64) for name in ("rates", "shares", "gains")]
    return Vectors(label, slug, columns[0], columns[1], columns[2])


def draw_front(tables: Sequence[Vectors]) -> Drawn | None:
    """Draw what each row of the tables gains against what it costs."""
    known = [table for table in tables if len(table.gains)]
    if not known:
        return None
    figure, axes = canvas(4.0)
    rows: list[tuple[object, ...]] = []
    for number, table in enumerate(known):
        axes.plot(
            table.shares, table.gains, label=table.label, drawstyle="steps-post", **line(number)
        )
        pairs = enumerate(zip(table.shares, table.gains, strict=True))
        rows += [
            (table.label, row, round(float(x), 6), round(float(y), 6)) for row, (x, y) in pairs
        ]
    axes.set_xlabel("expected MACs of a training step, share of the full network's")
    axes.set_ylabel("gain of accuracy in a short training")
    axes.legend(loc="lower right", handlelength=4.0, frameon=False)
    told = "; ".join(
        f"{table.label}: {len(table.shares)} rows from {table.shares[0]:.2f} of the cost "
        f"(gain {table.gains[0]:.3f}) to {table.shares[-1]:.2f} (gain {table.gains[-1]:.3f})"
        for table in known
    )
    head = ("table", "row", "cost share", "gain")
    return Drawn(
        "pareto", "Pareto front", f"Step chart of gain against cost. {told}.", figure, head, rows
    )


def draw_vectors(table: Vectors) -> Drawn:
    """Draw the rates of a table: a row for each vector, a column for each site."""
    rows, sites = table.rates.shape
    figure, axes = canvas(3.6)
    drawn = axes.imshow(
        table.rates, aspect="auto", origin="lower", cmap=SHADES, vmin=0.0,
        vmax=max(0.5, float(table.rates.max())), interpolation="nearest",
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set_xlabel("site, from input to output")
    axes.set_ylabel("row, from cheap to full")
    if sites <= SITES:
        axes.set_xticks(range(0, sites, max(1, sites // 16)))
    axes.set_yticks(*_ticks(table))
    bar = figure.colorbar(drawn, ax=axes, pad=0.01)
    bar.set_label("dropout rate")
    means = table.rates.mean(axis=0)
    high, low = int(means.argmax()), int(means.argmin())
    return Drawn(
        f"vectors-{table.slug}",
        f"Dropout vectors: {table.label}",
        f"Heat map of {rows} vectors of dropout rates over {sites} sites, darker where more is "
        f"dropped. On the mean over rows, site {high} drops most ({means[high]:.2f}) and site "
        f"{low} least ({means[low]:.2f}).",
        figure,
        ("row", "cost share", *(f"site {site}" for site in range(sites))),
        [
            (row, round(float(share), 6), *(round(float(rate), 4) for rate in vector))
            for row, (share, vector) in enumerate(zip(table.shares, table.rates, strict=True))
        ],
    )


def _ticks(table: Vectors) -> tuple[list[int], list[str]]:
    step = max(1, len(table.shares) // 8)
    rows = list(range(0, len(table.shares), step))
    return rows, [f"{row} ({table.shares[row]:.0%})" for row in rows]
