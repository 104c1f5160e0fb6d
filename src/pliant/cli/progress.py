"""A progress bar with an estimate on a terminal; plain lines, or nothing, elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done; what is yielded takes the new count.

    Lines that are printed meanwhile appear above the bar. It is shown only where both outputs are
    a terminal, so that a pipe gets lines and nothing else.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(highlight=False)) as shown:
        task = shown.add_task(what, total=total, completed=done)
        yield lambda count: shown.update(task, completed=count)


@contextmanager
def steps() -> Iterator[Callable[[str, int, int], None]]:
    """Show a job of named steps: a bar with the name of the current one, or a line for each.

    What is yielded takes the step that comes next, how many are done, and how many there are.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda text, done, total: _write(text)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(20), TimeRemainingColumn(), TextColumn("left, {task.description}"))
    with Progress(*columns, console=Console(highlight=False), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda text, done, total: shown.update(
            task, description=text, completed=done, total=total
        )


def _write(text: str) -> None:
    sys.stderr.write(f"{text}\n")
