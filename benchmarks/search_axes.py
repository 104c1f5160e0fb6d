"""Compare which layers a search by MACs and one by seconds drop, at equal step time.

    pliant search spec.toml --out runs/macs
    pliant search spec.toml search.cost=seconds --out runs/seconds --records runs/macs
    python benchmarks/search_axes.py runs/macs runs/seconds --picture runs/axes.png

Both searches need `search.profile`, so that both tables have the seconds of a step. Gains are
measured at the fresh seeds of each search.
"""

import argparse
from pathlib import Path

import numpy as np

from pliant.experiment.build import build_search
from pliant.experiment.config import SearchRun
from pliant.nn.elastic import elastic
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.table_file import load_table
from pliant.storage.run_dir import read_config
from pliant.table_search.run import TABLE_FILE
from pliant.value import decode

BUDGETS = (0.25, 0.5, 0.75)  # between the fastest row, 0, and the full network, 1


def main() -> None:
    """Print the rates by site and, with `--picture`, draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2, type=Path, help="of a search by MACs, and by seconds")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    tables = [load_table(folder / TABLE_FILE) for folder in options.folders]
    if not all(table.seconds for table in tables):
        raise SystemExit("expected two searches with `search.profile`, found no seconds")
    names = load_site_names(options.folders[0], tables[0])
    full = tables[0].seconds[-1]
    low = max(table.seconds[0] for table in tables)
    vectors: dict[str, list[tuple[float, ...]]] = {}
    for part in BUDGETS:
        budget = low + part * (full - low)
        rows = [find_row(table, budget) for table in tables]
        title = f"{budget / full:.0%} of the full step's time"
        vectors[title] = [table.rates[row] for table, row in zip(tables, rows, strict=True)]
        print(title)
        for cost, table, row in zip(("MACs", "seconds"), tables, rows, strict=True):
            time, share = table.seconds[row] / full, table.shares[row]
            gain = f"gain {table.gains[row]:.4f}"
            print(f"  by {cost:8} time {time:.3f}  MACs {share:.3f}  {gain}")
    print(f"\n{'rates by MACs / by seconds':34}" + "".join(f"{title[:4]:>12}" for title in vectors))
    for site, name in enumerate(names):
        cells = [f"{pair[0][site]:.2f} / {pair[1][site]:.2f}" for pair in vectors.values()]
        print(f"{name:34}" + "".join(f"{cell:>12}" for cell in cells))
    if options.picture is not None:
        draw_rate_comparison(options.picture, names, vectors)


def load_site_names(folder: Path, table: ParetoTable) -> list[str]:
    """Return the layers at each site of the network that a folder's search is for."""
    run = decode(read_config(folder), SearchRun)
    net, proxy = build_search(run)
    elastic_net = elastic(net, proxy.get_normalised(slice(0, 1)))
    table.check_network(elastic_net)
    return [", ".join(site.layers) for site in elastic_net.sites]


def find_row(table: ParetoTable, seconds: float) -> int:
    """Return the row of the most MACs that takes at most these seconds."""
    return max(0, int(np.searchsorted(table.seconds, seconds, side="right")) - 1)


def draw_rate_comparison(
    path: Path, sites: list[str], vectors_by_title: dict[str, list[tuple[float, ...]]]
) -> None:
    """Draw the rates of two vectors side by side, one panel per title."""
    from matplotlib.figure import Figure

    size = (1.8 + 1.9 * len(vectors_by_title), 1.2 + 0.2 * len(sites))
    figure = Figure(size, layout="constrained")
    positions = np.arange(len(sites))
    for number, (title, vectors) in enumerate(vectors_by_title.items(), start=1):
        axes = figure.add_subplot(1, len(vectors_by_title), number)
        for shift, rates, colour, name in zip(
            (-0.2, 0.2), vectors, ("#2c6fbb", "#c0392b"), ("by MACs", "by seconds"), strict=True
        ):
            axes.barh(positions + shift, rates, 0.4, color=colour, label=name)
        axes.set_yticks(positions, sites if number == 1 else [""] * len(sites), fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("rate")
        axes.set_title(title, fontsize=8, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
