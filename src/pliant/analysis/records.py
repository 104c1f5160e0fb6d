"""Read the records of runs, as far as pages, figures and tables show them."""

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from pliant.engine.record_fields import EVENTS, RoundFields, TaskFields, decode_round, decode_task


def read_rounds(folder: Path) -> list[RoundFields]:
    with open(folder / EVENTS, "rb") as file:
        return [record for record in map(decode_round, file) if record is not None]


def read_tasks(folder: Path, last_round: int) -> Iterator[TaskFields]:
    """Yield the tasks of the run in a folder, up to a round."""
    with open(folder / EVENTS, "rb") as file:
        tasks = (task for task in map(decode_task, file) if task is not None)
        yield from takewhile(lambda task: task.round <= last_round, tasks)
