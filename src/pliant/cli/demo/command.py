"""`pliant demo`: a tour of pliant on the bundled digits."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

import pliant as pl
from pliant.cli import INTEGER

if TYPE_CHECKING:
    from pliant.experiment.config import SearchRun
    from pliant.experiment.sweep import SweepRun

FIRST_FILE = "first.toml"  # as in the tutorial
SEARCH_TEXT = (
    "On 2,000 other digits: how many filters can each layer drop? Before every mini-batch, "
    "DISTREAL picks from the resulting table what the device can afford."
)


def demo(*, out: Path = Path("runs/demo"), seed: Annotated[int, INTEGER] = 0) -> None:
    """Search, train, slow down, kill, split and report on the bundled digits, in two minutes.

    Example: pliant demo --seed 1 --out runs/demo1

    Args:
        out: Folder for the runs and the report; finished runs in it are reused.
        seed: Seed of the devices and the weights.
    """
    try:
        _run_demo(Console(highlight=False), out, seed)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command to resume") from None


def _run_demo(console: Console, out: Path, seed: int) -> None:
    from pliant.cli.search import run_search

    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)  # fail before anything is printed
    _print_part(console, 1, "Search", SEARCH_TEXT)
    run_search(_make_search(seed), out / "search")
    federated_runs = _show_methods(console, out, seed)
    _show_busy_core(console, out / "device", seed)
    _show_kill(console, federated_runs, out)
    _show_split(console, out / "split", seed)
    _write_report(console, [out / "search", out / "methods", out / "split"], out / "report")
    _print_next_steps(console, out)
    _print(console, f"Total {time.monotonic() - start:.0f} s.")


def _show_methods(console: Console, out: Path, seed: int) -> "list[SweepRun]":
    from pliant.analysis.summary import summarise
    from pliant.cli.demo import methods

    _print_part(console, 2, "Train while resources change", methods.TEXT)
    table_path = (out / "search" / "table.safetensors").resolve()
    runs = methods.make_runs(seed, table_path)
    _run_with_progress(console, runs, out / "methods")
    rows = summarise(runs, out / "methods", methods.TARGET)
    results = methods.read_results(rows)
    console.print(methods.make_table(results))
    _print(console, methods.describe_results(results))
    return runs


def _show_busy_core(console: Console, folder: Path, seed: int) -> None:
    from pliant.cli.demo import busy_core

    _print_part(console, 3, "Share a core with a busy program", busy_core.TEXT)
    if not busy_core.can_pin():
        _print(console, busy_core.UNAVAILABLE)
        return
    device = busy_core.run_slowed_device(folder, seed)
    _print(console, busy_core.describe_slowed_device(device))


def _show_kill(console: Console, runs: "list[SweepRun]", out: Path) -> None:
    from pliant.cli.demo import kill

    _print_part(console, 4, "Kill and resume", kill.TEXT)
    run = runs[0]
    killed = kill.run_killed(run, out / "methods" / run.name, out / "killed")
    _print(console, *kill.describe_killed_run(killed).split("\n"))


def _show_split(console: Console, folder: Path, seed: int) -> None:
    from pliant.analysis.summary import summarise
    from pliant.cli.demo import split

    _print_part(console, 5, "Split a network", split.TEXT)
    runs = split.make_runs(seed)
    _run_with_progress(console, runs, folder)
    rows = summarise(runs, folder, target=0.9)
    console.print(split.make_table(rows))
    basic, ada, one_shot = rows
    _print(console, split.describe_one_shot(basic, one_shot))
    _print(console, split.describe_trade_off(basic, ada))


def _write_report(console: Console, folders: list[Path], report: Path) -> None:
    from pliant.cli.progress import show_steps
    from pliant.extras import MissingExtra
    from pliant.report.build import write_report

    console.print()
    try:
        with show_steps() as show_step:
            page = write_report(
                folders, report, target=0.9, command="pliant demo", on_progress=show_step
            )
    except MissingExtra as error:  # the results are printed above
        _print(console, f"No report: {error}")
    else:
        _print(console, f"To see all of it:     open {shlex.quote(str(page))} in a browser")


def _print_next_steps(console: Console, out: Path) -> None:
    """Print commands that work as they are; one of them runs a file that is written here."""
    file = out / FIRST_FILE
    if not file.exists():  # it may have been edited
        file.write_bytes(Path(__file__).with_name(FIRST_FILE).read_bytes())
    _print(console, f"To browse these runs: pliant dash {shlex.quote(str(out))}")
    _print(console, f"To run one yourself:  pliant run {shlex.quote(str(file))}")


def _print_part(console: Console, number: int, title: str, text: str) -> None:
    console.print()
    console.print(f"[bold]{number}. {title}[/bold]")
    _print(console, text)


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal, markup=False)


def _make_search(seed: int) -> "SearchRun":
    from pliant.experiment.config import DataConfig, NetworkConfig, SearchRun
    from pliant.table_search import SurrogateSearch

    short = pl.ShortTrainingSettings(batches=32, batch=32, eval_images=500)
    algorithm = SurrogateSearch(rounds=1, vectors=12)
    settings = pl.SearchSettings(algorithm, short, corner_seeds=4, fresh_seeds=2, rows=24)
    return SearchRun(settings, NetworkConfig("digits_cnn"), DataConfig("digits", proxy=2000), seed)


def _run_with_progress(console: Console, runs: "list[SweepRun]", folder: Path) -> None:
    from pliant.cli.compare import run_with_bar
    from pliant.experiment.sweep import is_finished

    if all(is_finished(folder / run.name) for run in runs):
        _print(console, f"   (finished earlier in {folder.parent}; choose another --out to rerun)")
    run_with_bar(runs, folder, pl.ProcessWorkers())
