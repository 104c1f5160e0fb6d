"""Write the records of a comparison as a compact CSV file, and print its table as Markdown.

    python scripts/export_records.py experiments/systems/digits.toml docs/results/systems_digits.csv

Reads the runs that `pliant compare` has finished. The CSV has a line for every evaluation, with
what the run has cost up to there; `used` is the share of the devices' compute whose result was
merged, `lost` the share of tasks whose result was not. The table has a row for each method:
accuracy (in per cent, mean and deviation over seeds), virtual seconds, bytes, MACs and C3-Score, as
`pliant compare` counts them.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from pliant.analysis.records import read_rounds
from pliant.analysis.style import MISSING
from pliant.analysis.summary import SummaryRow, summarise
from pliant.experiment.sweep import SweepRun, is_finished, load_sweep

COLUMNS = ("round", "seconds", "accuracy", "local_accuracy", "GMACs", "MB", "used", "lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("csv", type=Path)
    parser.add_argument("overrides", nargs="*", help="as given to `pliant compare`")
    parser.add_argument("--out", type=Path, help="folder of the runs; by default runs/NAME")
    parser.add_argument("--target", type=float, default=0.9)
    args = parser.parse_args()
    folder = args.out or Path("runs") / args.spec.stem
    all_runs = load_sweep(args.spec, args.overrides)
    runs = [run for run in all_runs if is_finished(folder / run.name)]
    if not runs:
        parser.error(f"expected finished runs in {folder}, found none")
    if len(runs) < len(all_runs):
        sys.stderr.write(f"{len(all_runs) - len(runs)} runs are not finished and left out\n")
    with args.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(key for key, _ in runs[0].axis_values), *COLUMNS])
        for run in runs:
            writer.writerows(list_evaluations(folder, run))
    sys.stdout.write(format_table(summarise(runs, folder, args.target), args.target))


def list_evaluations(folder: Path, run: SweepRun) -> Iterator[list[str]]:
    """Yield a line for each evaluation of a run."""
    macs = sent = useful = available = 0.0
    tasks = merged = 0
    for record in read_rounds(folder / run.name):
        macs, sent = macs + record.macs, sent + record.up + record.down
        useful, available = useful + record.useful, available + record.available
        tasks, merged = tasks + record.tasks, merged + record.merged
        if record.accuracy is None:
            continue
        local = None if record.personal is None else record.personal.local_accuracy
        yield [
            *(value for _, value in run.axis_values),
            f"{record.round + 1}",
            f"{record.seconds:.2f}",
            f"{record.accuracy:.4f}",
            "" if local is None else f"{local:.4f}",
            f"{macs / 1e9:.1f}",
            f"{sent / 1e6:.1f}",
            f"{useful / available:.3f}" if available else "",
            f"{1 - merged / tasks:.3f}" if tasks else "",
        ]


def format_table(rows: list[SummaryRow], target: float) -> str:
    header = ["method", "accuracy", "own", f"s to {target:.0%}", "s", "MB", "GMACs", "C3", "C3 own"]
    cells = [header, ["---"] * len(header), *(format_row(row) for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def format_row(row: SummaryRow) -> list[str]:
    mean, deviation = row.accuracy or (0.0, 0.0)
    server = f" + {row.server_gigamacs:.1f} on the server" if row.server_gigamacs else ""
    return [
        f"`{row.label}`",
        f"{100 * mean:.1f}" + (f" ± {100 * deviation:.1f}" if row.seeds > 1 else ""),
        MISSING if row.local_accuracy is None else f"{100 * row.local_accuracy:.1f}",
        MISSING if row.seconds_to_target is None else f"{row.seconds_to_target:.1f}",
        f"{row.seconds:.1f}",
        f"{row.megabytes:.1f}",
        f"{row.gigamacs:.1f}{server}",
        f"{row.c3:.3f}",
        MISSING if row.local_c3 is None else f"{row.local_c3:.3f}",
    ]


if __name__ == "__main__":
    main()
