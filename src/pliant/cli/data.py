"""`pliant data`: list, download and check data sets."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

if TYPE_CHECKING:  # the data layer imports torch, which help does not need
    from pliant.data.download.cache import DatasetStatus
    from pliant.data.download.fetch import ProgressCallback

    _ProgressFactory = Callable[[str], ProgressCallback]

app = App(name="data", help="List, download and check data sets.\n\nExample: pliant data list")

DataRoot = Annotated[Path | None, Parameter(name="--data")]


@app.command(name="list")
def list_datasets(*, data: DataRoot = None, json: bool = False) -> None:
    """List the data sets that pliant knows, and which are downloaded.

    Example: pliant data list --json

    Args:
        data: The data root; by default PLIANT_DATA, or else the user's cache folder.
        json: Print one JSON array instead of a table.
    """
    _show_statuses(data, verify=False, is_json=json)


@app.command
def check(*, data: DataRoot = None, json: bool = False) -> int:
    """Check the SHA-256 of every downloaded file; exit code 1 if one is damaged.

    Example: pliant data check --data /srv/data

    Args:
        data: The data root; by default PLIANT_DATA, or else the user's cache folder.
        json: Print one JSON array instead of a table.
    """
    statuses = _show_statuses(data, verify=True, is_json=json)
    return 1 if any(status.state == "damaged" for status in statuses) else 0


@app.command
def get(name: str, *, data: DataRoot = None) -> int:
    """Download a data set from its publisher, or resume an interrupted download.

    Example: pliant data get cifar10

    Args:
        name: A name shown by `pliant data list`.
        data: The data root; by default PLIANT_DATA, or else the user's cache folder.
    """
    from pliant.data.download.cache import download_dataset, get_data_root
    from pliant.data.sources import find_dataset

    root = get_data_root(data)
    manifest = find_dataset(name.replace("-", "_")).manifest
    with _show_progress() as progress:
        status = download_dataset(manifest, root, progress=progress)
    sys.stdout.write(f"{status.name}: {status.state} in {root / manifest.folder}\n")
    return 0 if status.state == "complete" else 1


def _show_statuses(data: Path | None, *, verify: bool, is_json: bool) -> "list[DatasetStatus]":
    from pliant.cli.progress import print_json
    from pliant.data.download.cache import get_data_root, inspect_dataset
    from pliant.data.sources import DATASETS

    root = get_data_root(data)
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(f"{root}: expected a folder of data sets, found a file")
    statuses = [inspect_dataset(known.manifest, root, verify=verify) for known in DATASETS.values()]
    if is_json:
        print_json(statuses)
        return statuses
    sys.stdout.write(f"data root: {root}\n")
    for status in statuses:
        sys.stdout.write(f"{status.name:<14} {status.state:<11} {status.title}\n")
        if status.state in ("damaged", "incomplete"):
            for word, paths in (("damaged", status.damaged), ("missing", status.missing)):
                for path in paths:
                    sys.stdout.write(f"    {word}: {path}\n")
    return statuses


def _print_tenths(name: str) -> "ProgressCallback":
    """Return a function that prints a line for every tenth of a file."""
    from pliant.cli.progress import print_line

    last = -1

    def show(done: int, total: int | None) -> None:
        nonlocal last
        tenth = 10 * done // total if total else done >> 24  # size unknown: a line every 16 MB
        if tenth > last:
            last = tenth
            share = f"{10 * tenth} % of {total:,} bytes" if total else f"{done:,} bytes"
            print_line(f"{name}: {share}")

    return show


@contextmanager
def _show_progress() -> "Iterator[_ProgressFactory]":
    if not sys.stdout.isatty():
        yield _print_tenths
        return
    from rich import progress

    sizes = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    columns = (progress.BarColumn(), *sizes, progress.TimeRemainingColumn())
    with progress.Progress("{task.description}", *columns) as bars:

        def add_bar(name: str) -> "ProgressCallback":
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield add_bar
