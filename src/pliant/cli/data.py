"""`pliant data`: which data sets are there, get one from its publisher, check them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

if TYPE_CHECKING:  # the data layer brings torch; help is shown without it
    from pliant.data.fetch import Progress
    from pliant.data.store import Status

app = App(name="data", help="List, get and check data sets.\n\nExample: pliant data list")

Root = Annotated[Path | None, Parameter(name="--data")]


@app.command(name="list")
def list_sets(*, data: Root = None, json: bool = False) -> None:
    """Show the data sets that pliant knows and which of them are there.

    Example: pliant data list --json

    Parameters
    ----------
    data
        The data root; otherwise PLIANT_DATA, otherwise the user's cache.
    json
        One JSON array instead of a table.
    """
    _show(_look(data, is_verified=False), data, is_json=json)


@app.command
def check(*, data: Root = None, json: bool = False) -> int:
    """Check the SHA-256 of every data file that is there; exit code 1 if one is damaged.

    Example: pliant data check --data /srv/data

    Parameters
    ----------
    data
        The data root; otherwise PLIANT_DATA, otherwise the user's cache.
    json
        One JSON array instead of a table.
    """
    found = _look(data, is_verified=True)
    _show(found, data, is_json=json)
    return 1 if any(one.state == "damaged" for one in found) else 0


@app.command
def get(name: str, *, data: Root = None) -> int:
    """Download a data set from its publisher, resuming what was cut.

    Example: pliant data get cifar10

    Parameters
    ----------
    name
        One of the names that `pliant data list` shows.
    data
        The data root; otherwise PLIANT_DATA, otherwise the user's cache.
    """
    from pliant.data.published import published
    from pliant.data.root import data_root
    from pliant.data.store import get as get_set

    root = data_root(data)
    wanted = published(name)
    with _bars() as progress:
        found = get_set(wanted, root, progress=progress)
    sys.stdout.write(f"{found.name}: {found.state} in {root / wanted.folder}\n")
    return 0 if found.state == "complete" else 1


def _look(data: Path | None, *, is_verified: bool) -> "list[Status]":
    from pliant.data.embedded_digits import digits_status
    from pliant.data.published import SETS
    from pliant.data.root import data_root
    from pliant.data.store import status

    root = data_root(data)
    return [digits_status(), *(status(one, root, is_verified=is_verified) for one in SETS)]


def _show(found: "list[Status]", data: Path | None, *, is_json: bool) -> None:
    import msgspec

    from pliant.data.root import data_root

    if is_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    sys.stdout.write(f"data root: {data_root(data)}\n")
    for one in found:
        sys.stdout.write(f"{one.name:<14} {one.state:<11} {one.title}\n")
        if one.state in ("damaged", "incomplete"):
            for word, paths in (("damaged", one.damaged), ("missing", one.missing)):
                for path in paths:
                    sys.stdout.write(f"    {word}: {path}\n")


class _Lines:
    """Progress as plain lines, one for every tenth of a file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tenth = -1

    def __call__(self, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else done >> 24  # else a line every 16 MB
        if tenth > self.tenth:
            self.tenth = tenth
            share = f"{10 * tenth} % of {total:,} bytes" if total else f"{done:,} bytes"
            sys.stdout.write(f"{self.name}: {share}\n")
            sys.stdout.flush()


@contextmanager
def _bars() -> "Iterator[_Maker]":
    if not sys.stdout.isatty():
        yield _Lines
        return
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns) as shown:

        def begin(name: str) -> "Progress":
            task = shown.add_task(name, total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield begin


if TYPE_CHECKING:
    from collections.abc import Callable

    _Maker = Callable[[str], Progress]
