"""Progress bars on a terminal; plain lines or nothing elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pliant.engine.ledger import RoundRecord
    from pliant.engine.record_fields import RoundFields


R = TypeVar("R")


def show_progress(records: Iterable[R], total: int, label: str = "rounds") -> Iterator[R]:
    """Yield the records of a run, and show how many of `total` are done and the time left.

    The bar appears on a terminal and in a notebook, and nowhere else.

    >>> import pliant as pl
    >>> list(pl.show_progress(iter("abc"), total=3))
    ['a', 'b', 'c']
    """
    with show_bar(label, total) as show_count:
        for count, record in enumerate(records, start=1):
            show_count(count)
            yield record


@contextmanager
def show_bar(label: str, total: float, done: int = 0) -> Iterator[Callable[[float], None]]:
    """Show a progress bar, and yield a function that sets the count.

    Printed lines appear above the bar. It is shown in a notebook, or if both outputs are a
    terminal, so that a pipe receives nothing but lines.
    """
    if display := _find_notebook_display():
        yield _make_notebook_bar(display, label, total)
        return
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


def _find_notebook_display() -> Callable[..., Any] | None:
    """Return the function that displays values in the notebook that runs this process, if any."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):  # none, or a terminal's
        return None
    from IPython.display import display

    display_function: Callable[..., Any] = display
    return display_function


def _make_notebook_bar(
    display: Callable[..., Any], label: str, total: float
) -> Callable[[float], None]:
    start = time.monotonic()

    def describe(count: float) -> dict[str, str]:
        share = count / total if total else 1.0
        text = f"{count:g} of {total:g} {label}"
        if 0.0 < share < 1.0:
            text += f", about {(time.monotonic() - start) * (1 / share - 1):.0f} s left"
        bar = f'<progress value="{share:.4f}" max="1"></progress> {text}'
        return {"text/plain": text, "text/html": bar}

    handle = display(describe(0), raw=True, display_id=True)
    return lambda count: handle.update(describe(count), raw=True)


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


def format_scores(record: "RoundRecord | RoundFields") -> str:
    """Return the loss and the accuracy of a round, as far as they are known."""
    loss = "" if record.loss is None else f"  loss {record.loss:.3f}"
    accuracy = "" if record.accuracy is None else f"  accuracy {record.accuracy:6.2%}"
    scores = record.on_devices
    devices = "" if scores is None else f"  worst decile of devices {scores.worst_decile:6.2%}"
    return loss + accuracy + devices
