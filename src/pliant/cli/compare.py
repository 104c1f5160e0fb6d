"""`pliant compare`: run a TOML file with a [matrix] and print a summary table."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.analysis.summary import SummaryRow
    from pliant.experiment.sweep import SweepRun
    from pliant.workers.pool import AnyWorkers

MAX_WIDTH, MAX_LABEL = 100, 32  # characters
# Columns that make room for the others, by the start of their headings.
LEAST_IMPORTANT = (
    "images",
    "best",
    "server",
    "trained",
    "lost",
    "C3 local",
    "local",
    "used",
    "rounds to",
)
POLL_SECONDS = 0.5


def compare(
    spec: Path,
    *overrides: str,
    only: tuple[str, ...] = (),
    out: Path | None = None,
    fresh: bool = False,
    target: float = 0.9,
    tensorboard: bool = False,
    json: bool = False,
) -> None:
    """Run every combination of a file's [matrix] and print a table; skip finished runs.

    A folder with runs of another experiment is refused.

    Example: pliant compare methods.toml --target 0.95

    Example: pliant compare methods.toml --only method=distreal --only seed=0

    Args:
        spec: A TOML file as for `pliant run`, with a table [matrix] of keys and their values.
        overrides: key=value pairs that override the file, like rounds=20.
        only: Value of an axis, like method=small, to which the runs and the table are limited.
            Repeat it for several.
        out: Folder for the runs; by default runs/NAME.
        fresh: Run everything again; an existing folder is renamed to NAME.old-1, -2 and so on.
        target: Accuracy for the columns that count rounds and seconds to the target.
        tensorboard: Also write TensorBoard event files to FOLDER/tensorboard of each run.
        json: Print JSON lines instead of a table.
    """
    from pliant.analysis.summary import summarise
    from pliant.experiment.sweep import load_sweep, resolve_workers, select_runs
    from pliant.report.tensorboard import export_tensorboard
    from pliant.storage.run_dir import move_aside

    if not 0.0 < target <= 1.0:
        raise ValueError(f"Expected a target accuracy above 0 and up to 1, got {target}")
    if fresh and only:
        raise ValueError("Expected --fresh without --only: it renames the folder of all runs")
    runs = load_sweep(spec, overrides)
    if not runs[0].axis_values:
        raise ValueError(
            f"{spec}: expected a table [matrix] of keys and their values, found none; to run the "
            f"file as it is: pliant run {spec}"
        )
    runs = select_runs(runs, only)
    workers = resolve_workers(runs)
    named = out or Path("runs") / spec.stem
    folder = named.resolve()
    if fresh and (old_folder := move_aside(folder)):
        sys.stderr.write(f"renamed {folder} to {old_folder.name}\n")
    try:
        warnings = run_with_bar(runs, folder, workers, prints=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command to resume") from None
    sys.stderr.write("".join(f"{warning}\n" for warning in warnings))
    for run in runs if tensorboard else ():
        export_tensorboard(folder / run.name)
    rows = summarise(runs, folder, target)
    sys.stdout.write(_format_json(rows) if json else _format_table(rows, target))
    if not json:
        sys.stdout.write(f"next: pliant report {shlex.quote(str(named))}\n")


def run_with_bar(
    runs: "list[SweepRun]", folder: Path, workers: "AnyWorkers", *, prints: bool = False
) -> list[str]:
    """Run or resume a sweep under a bar of all its rounds, and return its warnings.

    Print the finished runs if wanted.
    """
    from pliant.cli.progress import show_bar
    from pliant.experiment.sweep import is_finished, run_sweep

    finished = [run.name for run in runs if is_finished(folder / run.name)]
    followers = [_RoundFollower(run, folder / run.name) for run in runs]
    total = sum(run.experiment.rounds for run in runs)
    with show_bar("rounds", total, sum(follower.count() for follower in followers)) as show_count:

        def show_finished(run: "SweepRun") -> None:
            finished.append(run.name)
            if prints:
                sys.stderr.write(f"finished {run.name} ({len(finished)} of {len(runs)})\n")

        with _repeat(lambda: show_count(sum(follower.count() for follower in followers))):
            return run_sweep(runs, folder, workers, show_finished)


class _RoundFollower:
    """The rounds that a run has recorded so far, read as its file grows."""

    def __init__(self, run: "SweepRun", folder: Path) -> None:
        from pliant.engine.run_store import EVENTS_FILE
        from pliant.storage.tail import FileTail

        self._experiment, self._tail = run.experiment, FileTail(folder / EVENTS_FILE)
        self._done = 0

    def count(self) -> int:
        """Return the rounds so far; of a run that ends by its seconds, a share of all rounds."""
        from pliant.engine.record_fields import decode_round

        is_cut, lines = self._tail.read_new_lines()
        self._done = 0 if is_cut else self._done
        rounds, seconds = self._experiment.rounds, self._experiment.seconds
        for record in filter(None, map(decode_round, lines.splitlines(keepends=True))):
            share = 1.0 if record.digest else (record.seconds / seconds if seconds else 0.0)
            self._done = max(round(share * rounds), 0 if seconds else record.round + 1)
        return min(self._done, rounds)


@contextmanager
def _repeat(function: Callable[[], object]) -> Iterator[None]:
    """Call a function now and then in a thread, and once more at the end."""
    stop = Event()

    def call_until_stopped() -> None:
        while not stop.wait(POLL_SECONDS):
            function()

    thread = Thread(target=call_until_stopped, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        function()


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
    """Return a table of at most `MAX_WIDTH` columns; what does not fit is in the JSON output."""
    texts = [_format_row(row, target) for row in rows]
    first, *names = texts[0]
    columns = [first, *(name for name in names if any(text[name] for text in texts))]
    widths = {name: max(len(name), *(len(text[name]) for text in texts)) for name in columns}
    dropped = []
    for name in [name for start in LEAST_IMPORTANT for name in columns if name.startswith(start)]:
        if sum(widths[column] + 2 for column in columns) - 2 > MAX_WIDTH:
            columns.remove(name)
            dropped.append(name)
    lines = [
        f"{text[first]:{widths[first]}}"
        + "".join(f"  {text[name] or '-':>{widths[name]}}" for name in columns[1:])
        for text in [{name: name for name in columns} | {first: ""}, *texts]
    ]
    if dropped:
        lines.append(f"--json also has {', '.join(dropped)}")
    return "\n".join([*lines, *_describe_budgets(rows)]) + "\n"


def _format_row(row: "SummaryRow", target: float) -> dict[str, str]:
    """Return the cells of a row by heading; a cell is empty if its value is not known."""
    mean, spread = row.accuracy or (0.0, 0.0)

    def format_known(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    label = row.label
    return {
        "method": label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…",
        "accuracy": f"{mean:.2%} ± {spread:.2%}" if row.seeds > 1 else f"{mean:.2%}",
        f"at {row.equal_seconds or 0.0:.4g} s": format_known(row.equal_accuracy, ".2%"),
        "trained": format_known(row.trained_accuracy, ".2%"),
        f"rounds to {target:.0%}": format_known(row.rounds_to_target, ".1f"),
        f"s to {target:.0%}": format_known(row.seconds_to_target, ".1f"),
        "images": f"{row.images:.0f}",
        "GMACs": f"{row.gigamacs:.1f}",
        "server GMACs": f"{row.server_gigamacs:.1f}" if row.server_gigamacs else "",
        "MB": f"{row.megabytes:.1f}",
        "used": format_known(row.utilisation, ".0%"),
        "lost": format_known(row.lost_share, ".0%"),
        "best": f"{row.best_accuracy:.2%}",
        "local": format_known(row.local_accuracy, ".2%"),
        "C3": f"{row.c3:.3f}",
        "C3 local": format_known(row.local_c3, ".3f"),
    }


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
