"""Which layers a search by MACs drops and which one by seconds, at equal time of a step.

    pliant search spec.toml --out runs/macs
    pliant search spec.toml search.cost=seconds --out runs/seconds --records runs/macs
    python benchmarks/search_axes.py runs/macs runs/seconds --picture runs/axes.png

Both searches need `search.profile`, so that both tables tell the seconds of a step. Gains are those
at the fresh seeds of each search.
"""

import argparse
from pathlib import Path

import msgspec
import numpy as np

from pliant.engine.search import TABLE
from pliant.experiment import SearchRun, build_search
from pliant.explore import Table, load_table
from pliant.explore.pictures import draw_rates
from pliant.nn.elastic import elastic
from pliant.value import decode

BUDGETS = (0.25, 0.5, 0.75)  # of the way from the quickest row to the full network


def main() -> None:
    """Print rates site by site, and draw them if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2, type=Path, help="of a search by MACs, and by seconds")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    tables = [load_table(folder / TABLE) for folder in given.folders]
    if not all(table.seconds for table in tables):
        raise SystemExit("expected two searches with `search.profile`, found no seconds")
    names = sites(given.folders[0], tables[0])
    full = tables[0].seconds[-1]
    low = max(table.seconds[0] for table in tables)
    chosen: dict[str, list[tuple[float, ...]]] = {}
    for part in BUDGETS:
        budget = low + part * (full - low)
        rows = [fitting(table, budget) for table in tables]
        title = f"{budget / full:.0%} of the full step's time"
        chosen[title] = [table.rates[row] for table, row in zip(tables, rows, strict=True)]
        print(title)
        for kind, table, row in zip(("MACs", "seconds"), tables, rows, strict=True):
            time, share = table.seconds[row] / full, table.shares[row]
            gain = f"gain {table.gains[row]:.4f}"
            print(f"  by {kind:8} time {time:.3f}  MACs {share:.3f}  {gain}")
    print(f"\n{'rates by MACs / by seconds':34}" + "".join(f"{title[:4]:>12}" for title in chosen))
    for site, name in enumerate(names):
        told = [f"{pair[0][site]:.2f} / {pair[1][site]:.2f}" for pair in chosen.values()]
        print(f"{name:34}" + "".join(f"{text:>12}" for text in told))
    if given.picture is not None:
        draw_rates(given.picture, names, ("by MACs", "by seconds"), chosen)


def sites(folder: Path, table: Table) -> list[str]:
    """Return the names of the layers at each site of the network that a folder's search is for."""
    run = decode(msgspec.json.decode((folder / "config.json").read_bytes()), SearchRun)
    net, proxy = build_search(run)
    made = elastic(net, proxy.normalised(slice(0, 1)))
    table.check(made)
    return [", ".join(site.layers) for site in made.sites]


def fitting(table: Table, seconds: float) -> int:
    """Return the row of the most MACs that takes no longer."""
    return max(0, int(np.searchsorted(table.seconds, seconds, side="right")) - 1)


if __name__ == "__main__":
    main()
