"""`pliant search`: search for a table of rate vectors for a network."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.analysis.pareto_plot import CostLossPoints
    from pliant.experiment.config import SearchRun
    from pliant.nn.pareto_table import ParetoTable
    from pliant.table_search.run import SearchProgress


def search(
    spec: Path,
    *overrides: str,
    out: Path | None = None,
    records: Path | None = None,
    full: bool = False,
    pictures: bool = True,
    json: bool = False,
) -> int:
    """Search for rate vectors, or resume an interrupted search.

    Example: pliant search digits.toml search.seed=1

    To count seconds per step instead of MACs, pass a profile written by `pliant bench profile`; its
    path is relative to the TOML file:
    pliant search digits.toml search.cost=seconds search.profile=profile.json --out runs/seconds
    --records runs/search/digits

    Args:
        spec: A TOML file with the tables [network], [data] and [search].
        overrides: key=value pairs that override the file, like search.fresh_seeds=10.
        out: Folder of the search; by default runs/search/NAME.
        records: Folder of a search with the same objective but another cost or algorithm; its short
            trainings are reused.
        full: Run NSGA-II as in the paper instead of the fast search.
        pictures: Also plot the front and the vectors.
        json: Print progress as JSON lines instead of a bar.
    """
    from msgspec.structs import replace

    from pliant.experiment.config import load_search

    run = load_search(spec, overrides)
    if full:
        run = replace(run, search=replace(run.search, algorithm=run.search.full_algorithm))
    folder = out or Path("runs") / "search" / spec.stem
    try:
        table = run_search(run, folder, records_folder=records, is_json=json)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run the same command to resume\n")
        return 130
    if pictures:
        _draw_plots(run, folder)
    if not json:
        sys.stdout.write(f"{table}wrote {folder / 'table.safetensors'}\n")
    return 0


def run_search(
    run: "SearchRun", folder: Path, *, records_folder: Path | None = None, is_json: bool = False
) -> str:
    """Run or resume a search, show its progress, and return a text summary of the table."""
    from functools import partial

    import msgspec

    from pliant.experiment.build import build_search
    from pliant.storage.run_dir import create_run_dir, read_config, remove_unused
    from pliant.table_search.run import check_sides, copy_trials, iter_search
    from pliant.value import decode, encode

    net, proxy = build_search(run)  # may fail, so before creating the folder
    check_sides(net, proxy, run.search, run.network.elastic_options)
    saved = msgspec.structs.replace(run, workers=type(run).__struct_defaults__[-1])
    with remove_unused(folder):
        if not (folder / "config.json").exists():
            if records_folder is not None:
                copy_trials(records_folder, folder)
            create_run_dir(folder, encode(saved))
        elif (config := read_config(folder)).get("method") or decode(config, type(run)) != saved:
            raise ValueError(
                f"{folder} holds another search or a run: choose another folder with --out"
            )
        steps = iter_search(
            net,
            proxy,
            run.search,
            workers=run.workers,
            folder=folder,
            make_inputs=partial(build_search, run),
            elastic_options=run.network.elastic_options,
        )
        return _show_progress(steps, is_json=is_json)


def _show_progress(steps: "Iterator[SearchProgress]", *, is_json: bool) -> str:
    from msgspec.structs import replace
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    from pliant.cli.progress import print_json, print_line

    last = None
    if is_json or not sys.stderr.isatty():
        start = time.monotonic()
        for last in steps:
            if is_json:
                print_json(replace(last, table=None))
            else:
                seconds = time.monotonic() - start
                left = seconds * (last.expected - last.trainings) / max(1, last.trainings)
                print_line(
                    f"{_name_phase(last):8} {last.trainings:>6}/{last.expected} short trainings  "
                    f"hypervolume {last.hypervolume:.4f}  {seconds:8.0f} s, {left:8.0f} s left"
                )
    else:
        columns = ("{task.description:8}", BarColumn(20), "{task.fields[counts]}")
        with Progress(*columns, TimeRemainingColumn(), "left", console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None, counts="")  # the total is not known yet
            for last in steps:
                total = last.trainings if last.phase == "done" else last.expected
                counts = f"{last.trainings}/{total} short trainings"
                counts += f"  hypervolume {last.hypervolume:.4f}"
                bar.update(task, description=_name_phase(last), counts=counts)
                bar.update(task, completed=last.trainings, total=total)
    assert last is not None
    assert last.table is not None
    return f"{len(last.table.rates)} rows, {last.trainings} short trainings\n" + "".join(
        map(_describe_stage, last.table.split_stages())
    )


def _name_phase(progress: "SearchProgress") -> str:
    return progress.phase if progress.stage == 1 else f"{progress.phase} {progress.stage}"


def _describe_stage(table: "ParetoTable") -> str:
    """Return a few rows of a table as text."""
    text = f"stage {table.stages[0]:g}\n" if table.stages else ""
    for row in range(0, len(table.rates), max(1, len(table.rates) // 8)):
        share, gain, rates = table.shares[row], table.gains[row], table.rates[row]
        text += f"  {share:6.3f} of the MACs  gain {gain:7.4f}"
        text += f"  mean rate {sum(rates) / len(rates):.3f}"
        side, batch_share = table.get_scale(row)
        if table.sides:
            text += f"  side {side or 'full':>4}"
        if table.batch_shares:
            text += f"  batch {batch_share:.3g}"
        text += "\n"
    return text


def _draw_plots(run: "SearchRun", folder: Path) -> None:
    """Draw the front and the vectors of every stage."""
    from pliant.analysis import pareto_plot
    from pliant.storage.run_dir import TABLE_FILE

    tables = pareto_plot.load_table_file(folder / TABLE_FILE, folder.name, "")
    for stage, table in enumerate(tables):
        suffix = f"-{stage + 1}" if len(tables) > 1 else ""
        trials = _repeat_trials(run, folder, stage)
        front = pareto_plot.draw_search_fronts(trials, pareto_plot.normalise_front(table))
        front.save(folder / f"front{suffix}.png")
        pareto_plot.draw_rate_vectors(table).save(folder / f"vectors{suffix}.png")


def _repeat_trials(run: "SearchRun", folder: Path, stage: int) -> "CostLossPoints":
    """Return what a finished search tried at one of its stages."""
    from pliant.analysis.pareto_plot import CostLossPoints
    from pliant.experiment.build import build_search
    from pliant.table_search.run import open_search

    net, proxy = build_search(run)
    options = run.network.elastic_options
    with open_search(
        net, proxy, run.search, folder=folder, elastic_options=options, stage=stage
    ) as state:
        points = state.repeat_trials()
    return CostLossPoints("tried", points[:, 0], points[:, 1])
