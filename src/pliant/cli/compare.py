"""`pliant compare`: run a TOML file with a [matrix] and print a summary table."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.analysis.summary import SummaryRow
    from pliant.experiment.sweep import SweepRun
    from pliant.workers.pool import AnyWorkers


def compare(
    spec: Path,
    *overrides: str,
    out: Path | None = None,
    fresh: bool = False,
    target: float = 0.9,
    tensorboard: bool = False,
    json: bool = False,
) -> None:
    """Run every combination of a file's [matrix] and print a table; skip finished runs.

    A folder with runs of another experiment is refused.

    Example: pliant compare methods.toml --target 0.95

    Args:
        spec: A TOML file as for `pliant run`, with a table [matrix] of keys and their values.
        overrides: key=value pairs that override the file, like rounds=20.
        out: Folder for the runs; by default runs/NAME.
        fresh: Run everything again; an existing folder is renamed to NAME.old-1, -2 and so on.
        target: Accuracy for the columns that count rounds and seconds to the target.
        tensorboard: Also write TensorBoard event files to FOLDER/tensorboard of each run.
        json: Print JSON lines instead of a table.
    """
    from pliant.analysis.summary import summarise
    from pliant.experiment.sweep import load_sweep, resolve_workers
    from pliant.report.tensorboard import export_tensorboard
    from pliant.storage.run_dir import move_aside

    if not 0.0 < target <= 1.0:
        raise ValueError(f"Expected a target accuracy above 0 and up to 1, got {target}")
    runs = load_sweep(spec, overrides)
    if not runs[0].axis_values:
        raise ValueError(
            f"{spec}: expected a table [matrix] of keys and their values, found none; to run the "
            f"file as it is: pliant run {spec}"
        )
    workers = resolve_workers(runs)
    folder = (out or Path("runs") / spec.stem).resolve()
    if fresh and (old_folder := move_aside(folder)):
        sys.stderr.write(f"renamed {folder} to {old_folder.name}\n")
    try:
        run_with_bar(runs, folder, workers, prints=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command to resume") from None
    for run in runs if tensorboard else ():
        export_tensorboard(folder / run.name)
    rows = summarise(runs, folder, target)
    sys.stdout.write(_format_json(rows) if json else _format_table(rows, target))


def run_with_bar(
    runs: "list[SweepRun]", folder: Path, workers: "AnyWorkers", *, prints: bool = False
) -> None:
    """Run or resume a sweep under a progress bar; print the finished runs if wanted."""
    from pliant.cli.progress import show_bar
    from pliant.experiment.sweep import is_finished, run_sweep

    finished = [run.name for run in runs if is_finished(folder / run.name)]
    with show_bar("runs", len(runs), len(finished)) as show_count:

        def show_finished(run: "SweepRun") -> None:
            finished.append(run.name)
            if prints:
                sys.stderr.write(f"finished {run.name} ({len(finished)} of {len(runs)})\n")
            show_count(len(finished))

        run_sweep(runs, folder, workers, show_finished)


def _format_json(rows: "list[SummaryRow]") -> str:
    from dataclasses import asdict

    import msgspec

    text = ""
    for row in rows:
        plain = asdict(row) | {"group": dict(row.group)}
        del plain["rounds"], plain["joules"]  # a report shows them
        text += msgspec.json.encode(plain).decode() + "\n"
    return text


def _format_table(rows: "list[SummaryRow]", target: float) -> str:
    width = max((len(row.label) for row in rows), default=0)
    head = (
        f"{'':{width}}  {'accuracy':>15}  {'trained':>7}  {f'rounds to {target:.0%}':>14}  "
        f"{'seconds':>8}  {'images':>8}  {'GMACs':>9}  {'MB':>8}  {'used':>5}  {'lost':>5}  "
        f"{'best':>7}  {'local':>7}  {'C3':>5}  {'C3 local':>8}"
    )
    lines = [head]
    for row in rows:
        mean, spread = row.accuracy or (0.0, 0.0)
        used = "-" if row.utilisation is None else f"{row.utilisation:.0%}"
        lost = "-" if row.lost_share is None else f"{row.lost_share:.0%}"
        trained = "" if row.trained_accuracy is None else f"{row.trained_accuracy:.2%}"
        local = "" if row.local_accuracy is None else f"{row.local_accuracy:.2%}"
        local_c3 = "" if row.local_c3 is None else f"{row.local_c3:.3f}"
        rounds = "-" if row.rounds_to_target is None else f"{row.rounds_to_target:.1f}"
        seconds = "-" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f}"
        lines.append(
            f"{row.label:{width}}  {mean:7.2%} ± {spread:5.2%}  {trained:>7}  {rounds:>14}  "
            f"{seconds:>8}  {row.images:8.0f}  {row.gigamacs:9.1f}  {row.megabytes:8.1f}  "
            f"{used:>5}  {lost:>5}  {row.best_accuracy:7.2%}  {local:>7}  {row.c3:5.3f}  "
            f"{local_c3:>8}"
        )
    return "\n".join([*lines, *_describe_budgets(rows)]) + "\n"


def _describe_budgets(rows: "list[SummaryRow]") -> list[str]:
    """Return the budgets of the C3-Score, and whether others would change the order."""
    from pliant.analysis.summary import get_budgets, rank_by_c3

    megabytes, gigamacs = get_budgets(rows)
    lines = [f"C3 budgets, the largest above: {megabytes:.1f} MB and {gigamacs:.1f} GMACs"]
    order = rank_by_c3(rows)
    for name, factor in (("half", 0.5), ("double", 2.0)) if len(rows) > 1 else ():
        other = rank_by_c3(rows, factor)
        text = "the same order" if other == order else ", ".join(other)
        lines.append(f"with {name} the budgets: {text}")
    return lines
