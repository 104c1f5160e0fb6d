"""Read the rounds of one run for the page: a few numbers per round, and its offset in the file.

Task records are skipped and read only for the rounds on display, so that a record file of any size
costs a few bytes per round.
"""

import math
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

from pliant.engine.record_fields import (
    TASK_PREFIX,
    RoundFields,
    TaskFields,
    decode_round,
    decode_task,
)
from pliant.storage.tail import FileTail, read_range

MAX_POINTS = 600  # per curve and message: more than a screen can show
MAX_TASKS = 400  # per round of a timeline
MAX_ROUND_BYTES = 1 << 23  # read per round of a timeline
COLUMNS = (
    "round", "seconds", "macs", "bytes", "accuracy", "loss", "used", "merged", "side", "staleness",
    "devices", "spread", "worst",
)  # fmt: skip


class RunView:
    """The rounds of a run so far, by column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = FileTail(path)
        self._clear()

    def _clear(self) -> None:
        self.columns = {name: array("d") for name in COLUMNS}
        self.round_offsets = array("q", [0])  # in the file, of each round's first record

    def __len__(self) -> int:
        return len(self.columns["round"])

    def read_more(self) -> bool:
        """Read the next part of the file and return whether there was one."""
        offset = self._tail.offset
        is_cut, text = self._tail.read_new_lines()
        if is_cut:
            self._clear()
            offset = 0
        for line in text.splitlines(keepends=True):
            offset += len(line)
            record = decode_round(line)
            if record is not None:
                self._add_round(record, offset)
        return bool(text)

    def _add_round(self, record: RoundFields, end: int) -> None:
        totals = self.columns["macs"], self.columns["bytes"]
        macs, traffic = (column[-1] if column else 0.0 for column in totals)
        scores = record.on_devices
        values = (
            record.round + 1,
            record.seconds,
            macs + record.macs,
            traffic + record.down + record.up,
            math.nan if record.accuracy is None else record.accuracy,
            math.nan if record.loss is None else record.loss,
            record.useful / record.available if record.available else math.nan,
            record.merged / record.tasks if record.tasks else math.nan,
            record.side or math.nan,
            math.nan if record.staleness is None else record.staleness,
            math.nan if scores is None else scores.accuracy,
            math.nan if scores is None else scores.spread,
            math.nan if scores is None else scores.worst_decile,
        )
        for name, value in zip(COLUMNS, values, strict=True):
            self.columns[name].append(value)
        self.round_offsets.append(end)

    def get_columns_since(self, first: int) -> dict[str, list[float | None]]:
        """Return the rounds from an index on, thinned to what a screen can show."""
        indices = thin_indices(self.columns["accuracy"], first, MAX_POINTS)
        return {
            name: [column[i] if math.isfinite(column[i]) else None for i in indices]
            for name, column in self.columns.items()
        }

    def read_timeline(self, last: int, count: int) -> dict[str, Any]:
        """Return when each mini-batch of `count` rounds up to round `last` ran."""
        last = min(max(1, last), len(self))
        first = max(1, last - count + 1)
        rounds = [self._read_tasks(number) for number in range(first, last + 1)]
        staleness = self.columns["staleness"][first - 1 : last]
        unit = "version" if any(map(math.isfinite, staleness)) else "round"
        return {"first": first, "last": last, "rounds": rounds, "known": len(self), "unit": unit}

    def _read_tasks(self, number: int) -> dict[str, Any]:
        seconds = self.columns["seconds"]
        opened, closed = seconds[number - 2] if number > 1 else 0.0, seconds[number - 1]
        start, end = self.round_offsets[number - 1], self.round_offsets[number]
        text = read_range(self.path, start, min(end, start + MAX_ROUND_BYTES))
        lines = [line for line in text.splitlines(keepends=True) if line.startswith(TASK_PREFIX)]
        tasks = [
            _describe_task(task, opened, closed)
            for task in map(decode_task, lines[:MAX_TASKS])
            if task is not None  # cut off at MAX_ROUND_BYTES
        ]
        is_complete = start + MAX_ROUND_BYTES >= end and len(lines) <= MAX_TASKS
        side = self.columns["side"][number - 1]
        size = None if math.isnan(side) else int(side)  # the images are as they are
        about = {"opened": opened, "closed": closed, "side": size}
        return about | {"tasks": tasks, "whole": is_complete}


def _describe_task(task: TaskFields, opened: float, closed: float) -> dict[str, Any]:
    """Return a task with its times since the round opened; it may have been sent earlier."""
    sent_at = opened if task.sent_at is None else task.sent_at
    ends = task.complete_ends(closed - sent_at)
    return {
        "device": task.device,
        "end": task.outcome,
        "starts": [round(sent_at - opened + seconds, 6) for seconds in task.starts],
        "ends": [round(sent_at - opened + seconds, 6) for seconds in ends],
        "rows": task.rows,
    }


def thin_indices(values: "array[float]", first: int, limit: int) -> list[int]:
    """Return at most `limit` indices: of each stretch the last with a value, else the last.

    >>> from array import array
    >>> from pliant.dashboard.run_view import thin_indices
    >>> thin_indices(array("d", [0.1, float("nan"), 0.3, float("nan")]), 0, 2)
    [0, 3]
    """
    count = len(values) - first
    if count <= limit:
        return list(range(first, len(values)))
    edges = [first + count * part // limit for part in range(limit + 1)]
    indices = []
    for low, high in pairwise(edges):
        finite = (i for i in range(high - 1, low - 1, -1) if math.isfinite(values[i]))
        indices.append(next(finite, high - 1))
    indices[-1] = len(values) - 1  # the next message continues from here
    return indices
