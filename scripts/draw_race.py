r"""Draw the picture of the README: accuracy over virtual seconds, from published evaluations.

python scripts/draw_race.py docs/results/progressive_cifar10_nesterov.csv \
    docs/pictures/progressive.png
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

from pliant.analysis.style import ReportFigure, get_line_style, make_figure
from pliant.extras import require

NAMES = {
    "progressive": "progressive (ours)",
    "small": "a small network on all devices",
    "heterofl-fine": "HeteroFL, fine",
    "partial-work": "partial work (FedProx's rule)",
}


Curves = dict[str, dict[int, list[tuple[float, float]]]]  # seconds and accuracy of each seed


def read_curves(path: Path) -> Curves:
    """Return the times and accuracies of all seeds by method and round."""
    curves: Curves = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            point = float(row["seconds"]), float(row["trained_accuracy"])
            rounds = curves.setdefault(row["method"], {})
            rounds.setdefault(int(row["round"]), []).append(point)
    return curves


def draw_race(curves: Curves, *, smoothing: int = 5) -> Any:
    """Draw one line per method, the mean over seeds and over some evaluations, with a band."""
    figure, axes = make_figure(4.2)
    seeds = [len(points) for rounds in curves.values() for points in rounds.values()]
    order = sorted(curves, key=lambda method: list(NAMES).index(method))
    for index, method in enumerate(order):
        points = np.array([curves[method][number] for number in sorted(curves[method])])
        times, values = points[:, :, 0].mean(axis=1), points[:, :, 1]  # (evaluation, seed)
        kernel = np.ones(smoothing) / smoothing
        smooth = np.array([np.convolve(line, kernel, mode="valid") for line in values.T])
        times, mean = times[smoothing - 1 :], smooth.mean(axis=0)
        style = get_line_style(index) | {"markevery": 6}
        style["linewidth"] = 2.6 if method == "progressive" else 1.5
        axes.plot(times, mean, label=f"{NAMES[method]}: {mean[-1]:.1%}", **style)
        if len(smooth) > 1:
            spread = smooth.std(axis=0, ddof=1)
            axes.fill_between(times, mean - spread, mean + spread, alpha=0.15, linewidth=0)
    axes.set_xlabel("virtual seconds on the same 100 devices")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(require("matplotlib.ticker", "report").PercentFormatter(1.0))
    axes.set_ylim(bottom=0.45)
    numbers = f"{min(seeds)} to {max(seeds)}" if min(seeds) < max(seeds) else str(max(seeds))
    count = "one seed" if max(seeds) == 1 else f"mean and spread of {numbers} seeds"
    title = f"CIFAR-10, speeds that change twice per round: {count}"
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.legend(loc="lower right", handlelength=4.0)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    figure = draw_race(read_curves(options.csv))
    ReportFigure("race", "", "", figure, (), []).save(options.out)


if __name__ == "__main__":
    main()
