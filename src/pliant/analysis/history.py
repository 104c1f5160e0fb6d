"""Read the records of runs by column with duckdb, straight from the JSON lines.

A field that a record lacks is empty, so that every kind of run can be read.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pliant.analysis.runs import Run, RunGroup
from pliant.extras import require

Floats = NDArray[np.float64]

COLUMN_TYPES = {
    "type": "VARCHAR",
    "round": "BIGINT",
    "device": "BIGINT",
    "outcome": "VARCHAR",
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
    "personal": "STRUCT(per_device DOUBLE[])",  # accuracies, device by device
    "starts": "DOUBLE[]",
    "ends": "JSON",
    "outcomes": "JSON",
    "rows": "BIGINT[]",
}
ROUND_COLUMNS = (
    "round, seconds, tasks, merged, samples, steps, macs, useful, available, down, up, busy, joules"
)
ACCURACY_SQL = "coalesce(list_avg(personal.per_device), score.accuracy)"
SCORE_COLUMNS = f"loss, {ACCURACY_SQL} AS accuracy, score.loss AS test_loss"


class RecordDatabase:
    """A connection to record files that stores nothing on disk and uses one thread."""

    def __init__(self) -> None:
        self._connection = require("duckdb", "report").connect(config={"threads": 1})

    def query(self, path: Path, select: str, condition: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query on one record file."""
        self._connection.execute(f"SELECT {select} FROM {_format_source(path)} WHERE {condition}")
        rows: list[tuple[Any, ...]] = self._connection.fetchall()
        return rows

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _format_source(path: Path) -> str:
    columns = ", ".join(f"{_quote(name)}: {_quote(kind)}" for name, kind in COLUMN_TYPES.items())
    # duckdb takes the path for a glob pattern
    name = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))
    return (
        f"read_json({_quote(name)}, format='newline_delimited', ignore_errors=true, "
        f"maximum_object_size=268435456, columns={{{columns}}})"
    )


@dataclass(frozen=True, eq=False)
class RunHistory:
    """The rounds of one run, by column."""

    run: Run
    columns: dict[str, Floats]
    outcome_counts: dict[str, int]  # of tasks

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    @cached_property
    def is_evaluated(self) -> NDArray[np.bool_]:
        """Return in which rounds the network was evaluated."""
        return np.isfinite(self["accuracy"])

    def axis(self, name: str) -> Floats:
        """Return rounds, virtual seconds, MACs or bytes so far, at the end of each round."""
        match name:
            case "rounds":
                return self["round"] + 1
            case "seconds":
                return self["seconds"]
            case "macs":
                return _accumulate(self["macs"])
            case _:
                return _accumulate(np.nan_to_num(self["down"]) + np.nan_to_num(self["up"]))

    def total(self, name: str) -> float:
        """Return the sum of a column."""
        return float(np.nansum(self[name]))

    @property
    def final_accuracy(self) -> float | None:
        """Return the last accuracy, if there is one."""
        accuracies = self["accuracy"][self.is_evaluated]
        return float(accuracies[-1]) if len(accuracies) else None


def _accumulate(column: Floats) -> Floats:
    return np.asarray(np.cumsum(np.nan_to_num(column)), np.float64)


def load_run_history(database: RecordDatabase, run: Run) -> RunHistory | None:
    """Read the rounds of a run; None if it has none."""
    rows = database.query(
        run.events_path,
        f"{ROUND_COLUMNS}, {SCORE_COLUMNS}, outcomes",
        "type = 'round' ORDER BY round",
    )
    if not rows:
        return None
    names = [*ROUND_COLUMNS.split(", "), "loss", "accuracy", "test_loss"]
    columns = {
        name: np.array([np.nan if row[i] is None else row[i] for row in rows], np.float64)
        for i, name in enumerate(names)
    }
    outcome_counts: dict[str, int] = {}
    for row in rows:
        for outcome, count in msgspec.json.decode(row[-1] or "{}", type=dict[str, int]).items():
            outcome_counts[outcome] = outcome_counts.get(outcome, 0) + count
    return RunHistory(run, columns, outcome_counts)


@dataclass(frozen=True)
class TaskTimeline:
    """When the mini-batches of one device ran in one round, in seconds since the run's start."""

    round: int
    device: int
    outcome: str
    spans: tuple[tuple[float, float], ...]  # the deadline may have cut off the last one
    rows: tuple[int, ...]


def load_task_timelines(
    database: RecordDatabase, history: RunHistory, first_round: int, round_count: int
) -> list[TaskTimeline]:
    """Read when each mini-batch of some rounds ran."""
    round_ends = dict(zip(history["round"].astype(int).tolist(), history["seconds"], strict=True))
    where = f"type = 'task' AND round BETWEEN {first_round} AND {first_round + round_count - 1}"
    timelines = []
    select = "round, device, outcome, starts, ends, rows, seconds"
    for number, device, outcome, starts, ends_json, rows, seconds in database.query(
        history.run.events_path, select, f"{where} ORDER BY round, device"
    ):
        if not starts or number not in round_ends:
            continue
        round_start = float(round_ends.get(number - 1, 0.0))
        ends = msgspec.json.decode(ends_json or "[]", type=list[float])
        limit = min(starts[0] + (seconds or 0.0), float(round_ends[number]) - round_start)
        ends += [max(limit, starts[-1])] * (len(starts) - len(ends))
        spans = tuple(
            (round_start + start, round_start + end)
            for start, end in zip(starts, ends, strict=True)
        )
        timelines.append(TaskTimeline(number, device, outcome or "", spans, tuple(rows or ())))
    return timelines


@dataclass(frozen=True, eq=False)
class GroupHistory:
    """A group with the histories of its runs."""

    group: RunGroup
    histories: tuple[RunHistory, ...]

    @property
    def label(self) -> str:
        """Return the group's label."""
        return self.group.label


def load_group_histories(database: RecordDatabase, groups: list[RunGroup]) -> list[GroupHistory]:
    """Read the histories of all groups that have a finished round."""
    group_histories = []
    for group in groups:
        histories = (load_run_history(database, run) for run in group.runs)
        finished = tuple(history for history in histories if history is not None)
        if finished:
            group_histories.append(GroupHistory(group, finished))
    return group_histories
