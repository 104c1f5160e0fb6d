"""Compare the searches on one spec, with all their tables measured at the same fresh seeds.

    python benchmarks/search.py experiments/search/digits.toml --out runs/search_bench/digits

Every search has its own folder and resumes from it, so the command can be killed and repeated. The
hypervolume and the mean over budgets (see `average_over_budgets`) are printed with their
spread over the seeds of the searches, and the number of short trainings. `judged.csv` has the
normalised cost and loss of every row. `uniform` and `linear` do not search: equal rates, and rates
that rise linearly with the depth, as those of stochastic depth do.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from pliant.experiment.build import build_search
from pliant.experiment.config import SearchRun, load_search
from pliant.nn.elastic import elastic
from pliant.nn.pareto_table import ParetoTable, linear_table
from pliant.rng import derive_seed
from pliant.table_search import Nsga2, RandomSearch, SearchSettings, SurrogateSearch, UniformRates
from pliant.table_search.pareto import FloatArray, hypervolume
from pliant.table_search.run import SearchProgress, iter_search, open_search

NAMES = ("uniform", "linear", "fast", "nsga2", "random")


def main() -> None:
    """Run the searches and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value pairs that override the file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="of each search")
    parser.add_argument("--judges", type=int, default=10, help="seeds of the final measurement")
    parser.add_argument("--rows", type=int, default=24, help="rows of each table that are measured")
    parser.add_argument("--only", nargs="*", default=list(NAMES))
    options = parser.parse_args()
    run = load_search(options.spec, options.overrides)
    algorithms = make_algorithms(run.search)
    results: dict[str, list[SearchProgress]] = {}
    for name in options.only:
        if name == "linear":
            table = make_linear_table(run)
            results[name] = [SearchProgress("done", 0, 0, hypervolume=0.0, table=table)]
            continue
        for seed in range(options.seeds if name != "uniform" else 1):
            settings = msgspec.structs.replace(run.search, algorithm=algorithms[name], seed=seed)
            result = run_search(run, settings, options.out / f"{name}-{seed}")
            results.setdefault(name, []).append(result)
    compare_tables(options, run, results)


def make_algorithms(
    settings: SearchSettings,
) -> dict[str, SurrogateSearch | Nsga2 | RandomSearch | UniformRates]:
    """Return the searches; random search gets as many vectors as the genetic one."""
    full, fast = settings.full_algorithm, settings.algorithm
    return {
        "fast": fast if isinstance(fast, SurrogateSearch) else SurrogateSearch(),
        "nsga2": full,
        "random": RandomSearch(vectors=full.population * (full.generations + 1)),
        "uniform": UniformRates(settings.rows),
    }


def make_linear_table(run: SearchRun) -> ParetoTable:
    """Return a table by the rule of stochastic depth, with the rows and the rates of a search."""
    net, proxy = build_search(run)
    settings = run.search
    elastic_net = elastic(net, proxy.get_normalised(slice(0, 1)))
    choice = settings.objective.choice
    return linear_table(elastic_net, settings.rows, settings.highest_rate, choice)


def run_search(run: SearchRun, settings: SearchSettings, folder: Path) -> SearchProgress:
    """Run one search, print its progress, and return the last one."""
    net, proxy = build_search(run)
    start, progress = time.monotonic(), None
    for progress in iter_search(
        net,
        proxy,
        settings,
        workers=run.workers,
        folder=folder,
        make_inputs=partial(build_search, run),
    ):
        count = f"{progress.trainings}/{progress.expected}"
        volume, seconds = progress.hypervolume, time.monotonic() - start
        text = f"{folder.name} {progress.phase} {count} hypervolume {volume:.4f} {seconds:.0f} s"
        sys.stderr.write(f"{text}\n")
    assert progress is not None
    return progress


def compare_tables(
    options: argparse.Namespace, run: SearchRun, results: dict[str, list[SearchProgress]]
) -> None:
    """Measure rows of every table at the same seeds and print the scores."""
    selected = {
        (name, seed): select_spaced_rows(result.table, options.rows)
        for name, by_seed in results.items()
        for seed, result in enumerate(by_seed)
        if result.table is not None
    }
    points = measure_points(options, run, {rates for rows in selected.values() for rates in rows})
    print(f"{'search':8} {'hypervolume':>17} {'served':>17} {'trainings':>10} {'of nsga2':>9}")
    base = results["nsga2"][0].trainings if "nsga2" in results else None
    lines = ["search,seed,trainings,cost,loss"]
    for name, by_seed in results.items():
        volumes, averages = [], []
        for seed, result in enumerate(by_seed):
            rows = sorted(points[rates] for rates in selected[name, seed])
            prefix = f"{name},{seed},{result.trainings}"
            lines += [f"{prefix},{cost:.6f},{loss:.6f}" for cost, loss in rows]
            costs, losses = np.array(rows).T
            volumes.append(hypervolume(costs, losses))
            averages.append(average_over_budgets(costs, losses))
        count = by_seed[0].trainings
        share = f"{count / base:9.1%}" if base else ""
        scores = f"{format_spread(volumes):>17} {format_spread(averages):>17}"
        print(f"{name:8} {scores} {count:>10} {share}")
    (options.out / "judged.csv").write_text("\n".join(lines) + "\n")


def measure_points(
    options: argparse.Namespace, run: SearchRun, rows: set[tuple[float, ...]]
) -> dict[tuple[float, ...], list[float]]:
    """Return cost and loss of each vector, measured at seeds that no search has used."""
    net, proxy = build_search(run)
    seeds = tuple(derive_seed(run.search.objective.seed, "judge", n) for n in range(options.judges))
    vectors = sorted(rows)
    with open_search(
        net,
        proxy,
        run.search,
        workers=run.workers,
        folder=options.out / "judge",
        make_inputs=partial(build_search, run),
    ) as state:
        points = state.measure_vectors(np.array(vectors), seeds)
    return dict(zip(vectors, points.tolist(), strict=True))


def select_spaced_rows(table: ParetoTable, count: int) -> list[tuple[float, ...]]:
    """Return rows of a table that are evenly spaced in cost."""
    shares = np.asarray(table.shares)
    targets = np.linspace(shares[0], shares[-1], count)
    rows = sorted({int(np.abs(shares - target).argmin()) for target in targets})
    return [table.rates[row] for row in rows]


def average_over_budgets(costs: FloatArray, losses: FloatArray) -> float:
    """Return the mean of 1 - loss over budgets from 0 to 1, at the dearest row that fits each.

    Rows are sorted by cost. A row counts even where a cheaper one is better, so the mean is linear
    in the losses, and noise does not inflate it as it inflates the hypervolume.
    """
    edges = np.append(np.clip(costs, 0.0, 1.0), 1.0)
    return float(((edges[1:] - edges[:-1]) * (1.0 - losses)).sum())


def format_spread(values: list[float]) -> str:
    """Format mean and standard deviation."""
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ± {std:.4f}"


if __name__ == "__main__":
    main()
