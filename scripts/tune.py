"""Tune the methods of a comparison by successive halving, and print the best of each.

    python scripts/tune.py experiments/progressive/tune_cifar10.toml

The file has a [matrix] with the axis `method`; the other axes are what to tune. Every combination
runs for the first 20 % of the rounds, the better half of each method's for 40 %, and the better
half of those for 60 %. A combination counts by the mean of its last two evaluations, at the size
that was trained last. Killed at any time, the same command resumes.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records
from pliant.experiment.build import build_experiment, run_experiment
from pliant.experiment.config import start_run
from pliant.experiment.sweep import SweepRun, load_sweep
from pliant.params import Params
from pliant.storage.run_dir import CONFIG_FILE
from pliant.workers.pool import InlineWorkers, ProcessWorkers, open_pool

SHARES = (0.2, 0.4, 0.6)  # of the rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value pairs, like rounds=20")
    parser.add_argument("--out", type=Path, help="folder of the runs; by default runs/NAME")
    parser.add_argument("--processes", type=int, default=None)
    args = parser.parse_args()
    folder = (args.out or Path("runs") / args.spec.stem).resolve()
    runs = load_sweep(args.spec, args.overrides)
    scores: dict[SweepRun, list[float]] = {}
    for share in SHARES:
        rounds = round(share * runs[0].experiment.rounds)
        advance = partial(run_until, folder, rounds)
        with open_pool(ProcessWorkers(args.processes), skip_setup, advance) as pool:
            pool.run(runs, {}, on_finish=lambda run: sys.stderr.write(f"{run.name}\n"))
        for run in runs:
            scores.setdefault(run, []).append(score(folder / run.name, rounds))
        runs = [run for group in group_by_method(runs) for run in keep_half(group, scores)]
    write_table(scores)


def skip_setup() -> None:
    return None


def run_until(folder: Path, rounds: int, context: None, shared: Params, run: SweepRun) -> None:
    """Run or resume one combination until it has done this many rounds."""
    path, experiment = folder / run.name, run.experiment
    if not (path / CONFIG_FILE).exists():
        start_run(path, experiment)
    while (done := len(list_rounds(path))) < rounds:
        net, data = build_experiment(experiment)
        left = iter(range(rounds - done - 1))
        for _ in run_experiment(
            experiment,
            net,
            data,
            workers=InlineWorkers(),
            folder=path,
            is_stopped=lambda left=left: next(left, None) is None,
        ):
            pass


def list_rounds(path: Path) -> list[RoundRecord]:
    if not (path / "events.jsonl").exists():
        return []
    return [record for record in read_records(path) if isinstance(record, RoundRecord)]


def score(path: Path, rounds: int) -> float:
    """Return the mean accuracy of the last two evaluations within these rounds."""
    records = [record for record in list_rounds(path) if record.round < rounds and record.score]
    last = [record.trained_score or record.score for record in records[-2:]]
    return sum(value.accuracy for value in last if value) / len(last)


def group_by_method(runs: Sequence[SweepRun]) -> list[list[SweepRun]]:
    def get_method(run: SweepRun) -> str:
        return dict(run.axis_values)["method"]

    return [list(group) for _, group in groupby(sorted(runs, key=get_method), get_method)]


def keep_half(runs: list[SweepRun], scores: dict[SweepRun, list[float]]) -> list[SweepRun]:
    ranked = sorted(runs, key=lambda run: scores[run][-1], reverse=True)
    return ranked[: max(1, len(runs) // 2)]


def write_table(scores: dict[SweepRun, list[float]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    axes = [key for key, _ in next(iter(scores)).axis_values]
    writer.writerow([*axes, *(f"{share:.0%}" for share in SHARES)])
    for runs in group_by_method(list(scores)):
        for run in sorted(runs, key=lambda run: [len(scores[run]), scores[run][-1]], reverse=True):
            values = [value for _, value in run.axis_values]
            writer.writerow([*values, *(f"{value:.4f}" for value in scores[run])])


if __name__ == "__main__":
    main()
