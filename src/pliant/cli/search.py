"""`pliant search`: find a table of rate vectors for a network, with its records and pictures."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

EQUAL = 9  # vectors of equal rates in the picture

if TYPE_CHECKING:
    from pliant.engine.search import Progress
    from pliant.experiment import SearchRun


def search(
    spec: Path,
    *overrides: str,
    out: Path | None = None,
    records: Path | None = None,
    full: bool = False,
    pictures: bool = True,
    uniform: bool = False,
    json: bool = False,
) -> int:
    """Search for rate vectors; one that was interrupted goes on where it was.

    Example: pliant search digits.toml search.seed=1

    By the seconds of a step in the place of its MACs, with what `pliant bench profile` has written
    (search.profile counts from the folder of the TOML file):
    pliant search digits.toml search.cost=seconds search.profile=profile.json --out runs/seconds
    --records runs/search/digits

    Parameters
    ----------
    spec
        A TOML file with the tables [network], [data] and [search].
    overrides
        key=value in the place of what the file says, like search.fresh=10.
    out
        Folder of the search; runs/search/NAME by default.
    records
        Folder of another search, by another cost or algorithm: short trainings with the same
        objective that are on record there are not done again.
    full
        NSGA-II as in the paper, in the size that the file says, in the place of the fast search.
    pictures
        Draw the front and the vectors too.
    uniform
        Measure equal rates too, to compare with in the picture of the front.
    json
        JSON lines of progress instead of a bar.
    """
    from msgspec.structs import replace

    from pliant.experiment import load_search

    run = load_search(spec, overrides)
    if full:
        run = replace(run, search=replace(run.search, by=run.search.full))
    folder = out or Path("runs") / "search" / spec.stem
    try:
        table = shown(run, folder, records=records, json=json)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from here\n")
        return 130
    if pictures:
        _draw(run, folder, uniform=uniform)
    if not json:
        sys.stdout.write(table)
        sys.stdout.write(f"wrote {folder / 'table.safetensors'}\n")
    return 0


def shown(
    run: "SearchRun", folder: Path, *, records: Path | None = None, json: bool = False
) -> str:
    """Search, or go on with a search, show how far it is, and return lines about the table."""
    return _show(_explored(run, folder, records), json=json)


def _explored(run: "SearchRun", folder: Path, records: Path | None) -> "Iterator[Progress]":
    from functools import partial

    import msgspec

    from pliant.engine.search import borrow, explore
    from pliant.experiment import build_search
    from pliant.record import begin
    from pliant.value import decode, encode

    net, proxy = build_search(run)  # before the folder: what cannot be built leaves none
    asked = msgspec.structs.replace(run, workers=type(run).__struct_defaults__[-1])
    config = folder / "config.json"
    if not config.exists():
        if records is not None:
            borrow(records, folder)
        begin(folder, encode(asked))
    elif decode(msgspec.json.decode(config.read_bytes()), type(run)) != asked:
        raise ValueError(f"{folder} holds another search: choose another folder with --out")
    return explore(
        net,
        proxy,
        run.search,
        workers=run.workers,
        folder=folder,
        source=partial(build_search, run),
    )


def _show(steps: "Iterator[Progress]", *, json: bool) -> str:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    last = None
    if json or not sys.stderr.isatty():
        begun = time.monotonic()
        for last in steps:
            sys.stdout.write(_json(last) if json else _line(last, time.monotonic() - begun))
            sys.stdout.flush()
    else:
        columns = (
            TextColumn("{task.description:8}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} short trainings"),
            TextColumn("hypervolume {task.fields[volume]:.4f}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None, volume=0.0)
            for last in steps:
                bar.update(
                    task,
                    description=last.stage,
                    completed=last.trainings,
                    total=last.expected,
                    volume=last.hypervolume,
                )
    assert last is not None
    assert last.table is not None
    table = last.table
    head = f"{len(table.rates)} rows, {last.trainings} short trainings\n"
    lines = [
        f"  {share:6.3f} of the MACs  gain {gain:7.4f}  mean rate {sum(rates) / len(rates):.3f}\n"
        for share, gain, rates in list(zip(table.shares, table.gains, table.rates, strict=True))[
            :: max(1, len(table.rates) // 8)
        ]
    ]
    return head + "".join(lines)


def _line(step: "Progress", seconds: float) -> str:
    left = seconds * (step.expected - step.trainings) / max(1, step.trainings)
    return (
        f"{step.stage:8} {step.trainings:>6}/{step.expected} short trainings  "
        f"hypervolume {step.hypervolume:.4f}  {seconds:8.0f} s, {left:8.0f} s left\n"
    )


def _json(step: "Progress") -> str:
    import msgspec

    plain = msgspec.to_builtins(msgspec.structs.replace(step, table=None))
    return msgspec.json.encode(plain).decode() + "\n"


def _draw(run: "SearchRun", folder: Path, *, uniform: bool) -> None:
    """Draw the fronts and the vectors of a search that is done."""
    from functools import partial

    import numpy as np

    from pliant.engine.search import TABLE, measured, tried
    from pliant.experiment import build_search
    from pliant.explore import load_table
    from pliant.explore.pictures import Points, draw_fronts, draw_vectors
    from pliant.rng import number

    table = load_table(folder / TABLE)
    net, proxy = build_search(run)
    shares, gains = np.asarray(table.shares), np.asarray(table.gains)
    spread = max(gains[-1] - gains[0], 1e-9)
    costs = (shares - shares[0]) / (shares[-1] - shares[0])
    lines = [Points("table, at fresh seeds", costs, (gains[-1] - gains) / spread)]
    if uniform:
        how = run.search
        seeds = tuple(number(how.objective.seed, "fresh", place) for place in range(how.fresh))
        rates = np.linspace(0.0, how.highest, EQUAL)[:, None] * np.ones((1, len(table.rates[0])))
        found = measured(
            net,
            proxy,
            how,
            rates,
            seeds,
            workers=run.workers,
            folder=folder / "uniform",
            source=partial(build_search, run),
        )
        lines.append(Points("equal rates, at fresh seeds", found[:, 0], found[:, 1]))
    points = tried(net, proxy, run.search, folder)
    draw_fronts(folder / "front.png", Points("tried", points[:, 0], points[:, 1]), lines)
    draw_vectors(folder / "vectors.png", table)
