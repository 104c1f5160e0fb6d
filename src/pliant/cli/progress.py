"""Progress bars on a terminal; plain lines or nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pliant.engine.ledger import RoundRecord


@contextmanager
def show_bar(label: str, total: float, done: int = 0) -> Iterator[Callable[[float], None]]:
    """Show a progress bar, and yield a function that sets the count.

    Printed lines appear above the bar. It is shown only if both outputs are a terminal, so that a
    pipe receives nothing but lines.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich import progress
    from rich.console import Console

    counts = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    columns = (progress.TextColumn(label), *counts, "left", progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(highlight=False)) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield lambda count: bar.update(task, completed=count)


@contextmanager
def show_steps() -> Iterator[Callable[[str, int, int], object]]:
    """Show named steps as a bar, or as one line each.

    Yield a function that takes the name of the next step, the steps done and their total.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda text, done, total: sys.stderr.write(f"{text}\n")
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(20), TimeRemainingColumn(), TextColumn("left, {task.description}"))
    with Progress(*columns, console=Console(highlight=False), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total
        )


def print_line(text: str) -> None:
    """Print a line at once, so that a pipe receives it too."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    import msgspec

    print_line(msgspec.json.encode(value).decode())


def format_scores(record: "RoundRecord") -> str:
    """Return the loss and the accuracy of a round, as far as they are known."""
    loss = "" if record.loss is None else f"  loss {record.loss:.3f}"
    accuracy = "" if record.accuracy is None else f"  accuracy {record.accuracy:6.2%}"
    scores = record.on_devices
    devices = "" if scores is None else f"  worst decile of devices {scores.worst_decile:6.2%}"
    return loss + accuracy + devices
