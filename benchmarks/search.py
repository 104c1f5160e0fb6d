"""Full search, random search, equal rates and the fast search on one spec, judged at fresh seeds.

    python benchmarks/search.py experiments/search/digits.toml --out runs/search_bench/digits

Every search has a folder of its own and goes on from it, so the command can be killed and given
again. Then every vector of every table is measured at the same judging seeds, which no search has
seen, and the hypervolume and the served area (see `pliant.explore.front`) are printed with their
spread over the seeds of the searches, and the short trainings that each took. `judged.csv` has what
was measured, row by row: cost and loss, both normalised.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from pliant.engine.search import explore, measured
from pliant.experiment import build_search, load_search
from pliant.explore import Exploration, Fast, Nsga2, Random, Table, Uniform
from pliant.explore.front import hypervolume, served
from pliant.rng import number


def main() -> None:
    """Run what is asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value in the place of what the file says")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="of each search")
    parser.add_argument("--judges", type=int, default=10, help="seeds for the judgement")
    parser.add_argument("--rows", type=int, default=24, help="rows of each table that are judged")
    parser.add_argument("--only", nargs="*", default=["uniform", "fast", "nsga2", "random"])
    given = parser.parse_args()
    run = load_search(given.spec, given.overrides)
    net, proxy = build_search(run)
    ways = searches(run.search)
    tables: dict[str, list[tuple[Table, int]]] = {}
    for name in given.only:
        for seed in range(given.seeds if name != "uniform" else 1):
            how = msgspec.structs.replace(run.search, by=ways[name], seed=seed)
            begun, last = time.monotonic(), None
            for last in explore(
                net,
                proxy,
                how,
                workers=run.workers,
                folder=given.out / f"{name}-{seed}",
                source=partial(build_search, run),
            ):
                spent = time.monotonic() - begun
                told = f"{name}-{seed} {last.stage} {last.trainings}/{last.expected}"
                sys.stderr.write(f"{told} hypervolume {last.hypervolume:.4f} {spent:.0f} s\n")
            assert last is not None
            assert last.table is not None
            tables.setdefault(name, []).append((last.table, last.trainings))
    judged(given, run, tables)


def searches(how: Exploration) -> dict[str, Fast | Nsga2 | Random | Uniform]:
    """Return the searches; random search gets as many vectors as the genetic one."""
    full = how.full
    fast = how.by if isinstance(how.by, Fast) else Fast()
    many = Random(vectors=full.population * (full.generations + 1))
    return {"fast": fast, "nsga2": full, "random": many, "uniform": Uniform(how.rows)}


def judged(
    given: argparse.Namespace, run: object, tables: dict[str, list[tuple[Table, int]]]
) -> None:
    """Measure rows of every table at the same seeds and print what they hold."""
    from pliant.experiment import SearchRun

    assert isinstance(run, SearchRun)
    net, proxy = build_search(run)
    seeds = tuple(number(run.search.objective.seed, "judge", n) for n in range(given.judges))
    chosen = {
        (name, place): spaced(table, given.rows)
        for name, found in tables.items()
        for place, (table, _) in enumerate(found)
    }
    vectors = np.array(sorted({rates for rows in chosen.values() for rates in rows}))
    points = measured(
        net,
        proxy,
        run.search,
        vectors,
        seeds,
        workers=run.workers,
        folder=given.out / "judge",
        source=partial(build_search, run),
    )
    at = {tuple(v): point for v, point in zip(vectors.tolist(), points.tolist(), strict=True)}
    print(f"{'search':8} {'hypervolume':>17} {'served':>17} {'trainings':>10} {'of nsga2':>9}")
    base = tables["nsga2"][0][1] if "nsga2" in tables else None
    lines = ["search,seed,trainings,cost,loss"]
    for name, found in tables.items():
        areas, shares = [], []
        for place, (_, trainings) in enumerate(found):
            points = sorted(at[rates] for rates in chosen[name, place])
            lines += [f"{name},{place},{trainings},{cost:.6f},{loss:.6f}" for cost, loss in points]
            costs, losses = np.array(points).T
            areas.append(hypervolume(costs, losses))
            shares.append(served(costs, losses))
        count = found[0][1]
        part = f"{count / base:9.1%}" if base else ""
        print(f"{name:8} {spread(areas):>17} {spread(shares):>17} {count:>10} {part}")
    (given.out / "judged.csv").write_text("\n".join(lines) + "\n")


def spaced(table: Table, count: int) -> list[tuple[float, ...]]:
    """Return rows of a table whose costs lie evenly, so that every table has as many chances."""
    shares = np.asarray(table.shares)
    wanted = np.linspace(shares[0], shares[-1], count)
    places = sorted({int(np.abs(shares - at).argmin()) for at in wanted})
    return [table.rates[place] for place in places]


def spread(values: list[float]) -> str:
    """Return mean and standard deviation."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ± {sd:.4f}"


if __name__ == "__main__":
    main()
