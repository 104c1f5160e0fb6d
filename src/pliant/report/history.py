"""What the records of a run say, by column: read with duckdb, straight from the JSON lines.

A field that a record does not have is empty, so that runs of every kind can be read.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pliant.extras import need
from pliant.report.runs import Group, Run

Floats = NDArray[np.float64]

FIELDS = {
    "type": "VARCHAR",
    "round": "BIGINT",
    "device": "BIGINT",
    "end": "VARCHAR",
    "seconds": "DOUBLE",
    "tasks": "BIGINT",
    "merged": "BIGINT",
    "samples": "BIGINT",
    "steps": "BIGINT",
    "macs": "DOUBLE",
    "useful": "DOUBLE",
    "available": "DOUBLE",
    "down": "DOUBLE",
    "up": "DOUBLE",
    "busy": "DOUBLE",
    "joules": "DOUBLE",
    "loss": "DOUBLE",
    "score": "STRUCT(accuracy DOUBLE, loss DOUBLE)",
    "personal": 'STRUCT("each" DOUBLE[])',  # accuracies, device by device
    "starts": "DOUBLE[]",
    "ends": "JSON",  # times in a task's record, counts in a round's
    "rows": "BIGINT[]",
}
ROUND = (
    "round, seconds, tasks, merged, samples, steps, macs, useful, available, down, up, busy, joules"
)
ACCURACY = 'coalesce(list_avg(personal."each"), score.accuracy)'
SCORES = f"loss, {ACCURACY} AS accuracy, score.loss AS test_loss"


class Lake:
    """A connection to the records; it keeps nothing on disk and uses one thread."""

    def __init__(self) -> None:
        self._base = need("duckdb", "report").connect(config={"threads": 1})

    def ask(self, path: Path, select: str, where: str) -> list[tuple[Any, ...]]:
        """Return the rows that a query on one record file gives."""
        self._base.execute(f"SELECT {select} FROM {_source(path)} WHERE {where}")
        rows: list[tuple[Any, ...]] = self._base.fetchall()
        return rows

    def close(self) -> None:
        """Close the connection."""
        self._base.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _source(path: Path) -> str:
    columns = ", ".join(f"{_quoted(name)}: {_quoted(kind)}" for name, kind in FIELDS.items())
    # a glob would take [ or * in a folder's name for a pattern; a line cut short is left out
    name = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))
    return (
        f"read_json({_quoted(name)}, format='newline_delimited', ignore_errors=true, "
        f"maximum_object_size=268435456, columns={{{columns}}})"
    )


@dataclass(frozen=True, eq=False)
class History:
    """One run by rounds."""

    run: Run
    columns: dict[str, Floats]
    ends: dict[str, int]  # how many tasks ended how

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    @cached_property
    def scored(self) -> NDArray[np.bool_]:
        """Tell in which rounds the network was evaluated."""
        return np.isfinite(self["accuracy"])

    def axis(self, name: str) -> Floats:
        """Return rounds, virtual seconds, MACs or bytes so far, at the end of each round."""
        match name:
            case "rounds":
                return self["round"] + 1
            case "seconds":
                return self["seconds"]
            case "macs":
                return _summed(self["macs"])
            case _:
                return _summed(np.nan_to_num(self["down"]) + np.nan_to_num(self["up"]))

    def total(self, name: str) -> float:
        """Return the sum of a column."""
        return float(np.nansum(self[name]))

    @property
    def accuracy(self) -> float | None:
        """Return the last accuracy, if there is one."""
        found = self["accuracy"][self.scored]
        return float(found[-1]) if len(found) else None


def _summed(column: Floats) -> Floats:
    return np.asarray(np.cumsum(np.nan_to_num(column)), np.float64)


def load_history(lake: Lake, run: Run) -> History | None:
    """Read the rounds of a run; None if it has none."""
    rows = lake.ask(run.events, f"{ROUND}, {SCORES}, ends", "type = 'round' ORDER BY round")
    if not rows:
        return None
    names = [*ROUND.split(", "), "loss", "accuracy", "test_loss"]
    columns = {
        name: np.array([np.nan if row[at] is None else row[at] for row in rows], np.float64)
        for at, name in enumerate(names)
    }
    ends: dict[str, int] = {}
    for row in rows:
        for end, count in msgspec.json.decode(row[-1] or "{}", type=dict[str, int]).items():
            ends[end] = ends.get(end, 0) + count
    return History(run, columns, ends)


@dataclass(frozen=True)
class TaskLine:
    """When the mini-batches of one device ran in one round, in seconds of the whole run."""

    round: int
    device: int
    end: str
    spans: tuple[tuple[float, float], ...]  # the last one may have been cut off by the deadline
    rows: tuple[int, ...]


def load_tasks(lake: Lake, history: History, first: int, count: int) -> list[TaskLine]:
    """Read when each mini-batch of some rounds ran."""
    close = dict(zip(history["round"].astype(int).tolist(), history["seconds"], strict=True))
    where = f"type = 'task' AND round BETWEEN {first} AND {first + count - 1}"
    found = []
    select = 'round, device, "end", starts, ends, rows, seconds'
    for number, device, end, starts, ends, rows, busy in lake.ask(
        history.run.events, select, f"{where} ORDER BY round, device"
    ):
        if not starts or number not in close:
            continue
        opened = float(close.get(number - 1, 0.0))
        stops = msgspec.json.decode(ends or "[]", type=list[float])
        limit = min(starts[0] + (busy or 0.0), float(close[number]) - opened)
        stops += [max(limit, starts[-1])] * (len(starts) - len(stops))
        spans = tuple(
            (opened + start, opened + stop) for start, stop in zip(starts, stops, strict=True)
        )
        found.append(TaskLine(number, device, end or "", spans, tuple(rows or ())))
    return found


@dataclass(frozen=True, eq=False)
class Sample:
    """A group with the histories of its runs."""

    group: Group
    histories: tuple[History, ...]

    @property
    def label(self) -> str:
        """Return the group's label."""
        return self.group.label


def load_samples(lake: Lake, groups: list[Group]) -> list[Sample]:
    """Read the histories of all groups; groups without a finished round are left out."""
    found = []
    for group in groups:
        read = [load_history(lake, run) for run in group.runs]
        histories = tuple(history for history in read if history is not None)
        if histories:
            found.append(Sample(group, histories))
    return found
