"""Tune the methods of a comparison by successive halving, and print the best of each.

    python scripts/tune.py experiments/progressive/tune_cifar10.toml

The file has a [matrix] with the axis `method`; the other axes are what to tune. Every combination
runs for the first 20 % of its rounds or seconds, the better half of each method's for 40 %, and the
better half of those for 60 % (`--shares` has others). A combination counts by the mean of its last
two evaluations, at the size that was trained last; where devices have their own tests, by the
accuracy of the network that the method is made for: the shared one, or the devices' own if it
personalises. Killed at any time, the same command resumes.
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
from pliant.experiment.config import Experiment, start_run
from pliant.experiment.sweep import SweepRun, load_sweep
from pliant.methods.verbs import Personalises
from pliant.params import Params
from pliant.storage.run_dir import CONFIG_FILE
from pliant.workers.pool import InlineWorkers, ProcessWorkers, open_pool

SHARES = (0.2, 0.4, 0.6)  # of the rounds or seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value pairs, like rounds=20")
    parser.add_argument("--out", type=Path, help="folder of the runs; by default runs/NAME")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    args = parser.parse_args()
    folder = (args.out or Path("runs") / args.spec.stem).resolve()
    all_runs = runs = load_sweep(args.spec, args.overrides)
    scores: dict[str, list[float]] = {}  # by name
    for share in args.shares:
        advance = partial(run_until, folder, share)
        with open_pool(ProcessWorkers(args.processes), skip_setup, advance) as pool:
            pool.run(runs, {}, on_finish=lambda run: sys.stderr.write(f"{run.name}\n"))
        for run in runs:
            scores.setdefault(run.name, []).append(score(folder / run.name, run.experiment, share))
        runs = [run for group in group_by_method(runs) for run in keep_half(group, scores)]
    write_table(all_runs, scores, args.shares)


def skip_setup() -> None:
    return None


def run_until(folder: Path, share: float, context: None, shared: Params, run: SweepRun) -> None:
    """Run or resume one combination until it has done this share of its rounds or seconds."""
    path, experiment = folder / run.name, run.experiment
    if not (path / CONFIG_FILE).exists():
        start_run(path, experiment)
    records = list_rounds(path)
    if records and not is_within(records[-1], experiment, share):
        return
    net, data = build_experiment(experiment)
    reached: list[bool] = []
    for record in run_experiment(
        experiment,
        net,
        data,
        workers=InlineWorkers(),
        folder=path,
        is_stopped=lambda: bool(reached),
    ):
        if not is_within(record, experiment, share):
            reached.append(True)  # the next round is the last


def is_within(record: RoundRecord, experiment: Experiment, share: float) -> bool:
    """Return whether a round ends within a share of the run."""
    if experiment.seconds is not None:
        return record.seconds <= share * experiment.seconds + 1e-9
    return record.round < round(share * experiment.rounds)


def list_rounds(path: Path) -> list[RoundRecord]:
    if not (path / "events.jsonl").exists():
        return []
    return [record for record in read_records(path) if isinstance(record, RoundRecord)]


def score(path: Path, experiment: Experiment, share: float) -> float:
    """Return the mean accuracy of the last two evaluations within a share of the run."""
    within = [record for record in list_rounds(path) if is_within(record, experiment, share)]
    is_personal = isinstance(experiment.method, Personalises)
    known = [get_accuracy(record, is_personal=is_personal) for record in within]
    accuracies = [value for value in known if value is not None][-2:]
    return sum(accuracies) / max(1, len(accuracies))


def get_accuracy(record: RoundRecord, *, is_personal: bool) -> float | None:
    """Return the accuracy of the shared network or of the devices' own."""
    if record.personal is not None:
        own = record.personal.local_accuracy or 0.0
        return own if is_personal else record.personal.accuracy
    score = record.trained_score or record.score
    return None if score is None else score.accuracy


def group_by_method(runs: Sequence[SweepRun]) -> list[list[SweepRun]]:
    def get_method(run: SweepRun) -> str:
        return dict(run.axis_values)["method"]

    return [list(group) for _, group in groupby(sorted(runs, key=get_method), get_method)]


def keep_half(runs: list[SweepRun], scores: dict[str, list[float]]) -> list[SweepRun]:
    ranked = sorted(runs, key=lambda run: scores[run.name][-1], reverse=True)
    return ranked[: max(1, len(runs) // 2)]


def write_table(
    all_runs: list[SweepRun], scores: dict[str, list[float]], shares: Sequence[float]
) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    axes = [key for key, _ in all_runs[0].axis_values]
    writer.writerow([*axes, *(f"{share:.0%}" for share in shares)])
    for runs in group_by_method(all_runs):
        by_name = {run.name: [value for _, value in run.axis_values] for run in runs}
        ranked = sorted(by_name, key=lambda name: [len(scores[name]), scores[name][-1]])
        for name in reversed(ranked):
            writer.writerow([*by_name[name], *(f"{value:.4f}" for value in scores[name])])


if __name__ == "__main__":
    main()
