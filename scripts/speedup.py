"""Compare how many virtual seconds methods need for the accuracy of the best rival.

    python scripts/speedup.py experiments/progressive/cifar10.toml --out runs/cifar10

Reads the runs of a comparison with the axes `method` and `seed`. A curve is the mean of
`--window` evaluations in a row, of their times and of their accuracies, at the size that was
trained last. The best rival has the highest mean at the end, over all seeds. Its value at the end,
and at a third of the time, are the targets, for each seed apart. Prints the mean accuracy of every
method at both times, and for each seed how many times fewer seconds `--method` needs; writes all
curves to `curves.csv` in the folder of the runs.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pliant.analysis.records import read_rounds
from pliant.experiment.sweep import is_finished, load_sweep

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Accuracy over virtual seconds, both smoothed alike."""

    seconds: Floats
    accuracy: Floats

    @property
    def end(self) -> float:
        return float(self.accuracy[-1])

    def value_at(self, seconds: float) -> float:
        return float(np.interp(seconds, self.seconds, self.accuracy))

    def time_to(self, target: float) -> float | None:
        """Return when the curve first reaches the target, None if it never does."""
        reached = self.accuracy >= target
        if not reached.any():
            return None
        last = int(reached.argmax())
        if last == 0:
            return float(self.seconds[0])
        ends = slice(last - 1, last + 1)
        return float(np.interp(target, self.accuracy[ends], self.seconds[ends]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the runs; by default runs/NAME")
    parser.add_argument("--method", default="progressive")
    parser.add_argument("--window", type=int, default=5, help="evaluations in a mean")
    parser.add_argument("--full-size", action="store_true", help="count accuracy at full size only")
    args = parser.parse_args()
    folder = args.out or Path("runs") / args.spec.stem
    curves: dict[str, dict[str, Curve]] = {}
    with open(folder / "curves.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "seed", "round", "seconds", "accuracy", "trained_accuracy"])
        for run in load_sweep(args.spec):
            axes = dict(run.axis_values)
            if not is_finished(folder / run.name):
                sys.stderr.write(f"left out, not finished: {run.name}\n")
                continue
            rows = read_evaluations(folder / run.name)
            writer.writerows([axes["method"], axes["seed"], *row] for row in rows)
            column = 2 if args.full_size else 3
            points = np.array([[row[1], row[column]] for row in rows])
            curves.setdefault(axes["method"], {})[axes["seed"]] = smooth(points, args.window)
    print_comparison(curves, args.method)


def read_evaluations(folder: Path) -> list[tuple[int, float, float, float]]:
    """Return round, seconds, accuracy at full size and at the size trained."""
    rows = []
    for record in read_rounds(folder):
        if record.accuracy is not None:  # devices with tests of their own use the size trained
            trained = record.trained_score.accuracy if record.trained_score else None
            accuracies = record.accuracy, trained or record.accuracy
            rows.append((record.round + 1, record.seconds, *accuracies))
    return rows


def smooth(points: Floats, window: int) -> Curve:
    windows = np.lib.stride_tricks.sliding_window_view(points, window, axis=0).mean(axis=-1)
    return Curve(windows[:, 0], windows[:, 1])


def print_comparison(curves: Mapping[str, Mapping[str, Curve]], method: str) -> None:
    ends = {name: statistics.fmean(c.end for c in runs.values()) for name, runs in curves.items()}
    third = {
        name: statistics.fmean(curve.value_at(curve.seconds[-1] / 3) for curve in runs.values())
        for name, runs in curves.items()
    }
    sys.stdout.write(f"{'method':<24} {'at a third':>10} {'at the end':>10}  accuracy in %\n")
    for name in sorted(ends, key=lambda name: -ends[name]):
        sys.stdout.write(f"{name:<24} {100 * third[name]:>10.2f} {100 * ends[name]:>10.2f}\n")
    own = curves[method]
    for rival, runs in curves.items():
        if rival == method:
            continue
        for label in ("a third", "the end"):
            ratios = [compute_ratio(own[s], runs[s], label) for s in own if s in runs]
            known = [ratio for ratio in ratios if ratio is not None]
            is_whole = known and len(known) == len(ratios)
            mean = f"{statistics.fmean(known):.2f}" if is_whole else "-"
            each = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            sys.stdout.write(
                f"{method} to {rival}'s accuracy at {label}: {mean} x fewer seconds ({each})\n"
            )


def compute_ratio(own: Curve, rival: Curve, label: str) -> float | None:
    target = rival.end if label == "the end" else rival.value_at(rival.seconds[-1] / 3)
    own_time, rival_time = own.time_to(target), rival.time_to(target)
    return None if own_time is None or rival_time is None else rival_time / own_time


if __name__ == "__main__":
    main()
