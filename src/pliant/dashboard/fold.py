"""What the page needs of one run, folded line by line: a few numbers a round, and where it stands.

Task records are skipped here and read again only for the rounds that somebody looks at, so that a
record file of any size costs a few bytes a round.
"""

import math
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pliant.dashboard.tail import Tail, read_part

POINTS = 600  # of a curve that is sent at once: more than a screen can show
TASKS = 400  # of a timeline
BYTES = 1 << 23  # of the records of a round that are read for it
COLUMNS = ("round", "seconds", "macs", "bytes", "accuracy", "loss", "used", "merged")
TASK = b'{"type":"task"'


class _Score(msgspec.Struct):
    accuracy: float | None = None


class _Personal(msgspec.Struct):
    each: list[float] = []


class RoundLine(msgspec.Struct):
    """The fields of a round's record that the page shows; a record may lack all of them."""

    type: str = ""
    round: int = 0
    seconds: float = 0.0
    tasks: int = 0
    merged: int = 0
    macs: float = 0.0
    useful: float = 0.0
    available: float = 0.0
    down: float = 0.0
    up: float = 0.0
    loss: float | None = None
    score: _Score | None = None
    personal: _Personal | None = None

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy, or the mean over devices' own tests, if there was one."""
        if self.personal is not None and self.personal.each:
            return sum(self.personal.each) / len(self.personal.each)
        return self.score.accuracy if self.score else None


class _Task(msgspec.Struct):
    type: str = ""
    round: int = 0
    device: int = 0
    end: str = ""
    seconds: float = 0.0
    starts: list[float] = []
    ends: list[float] | dict[str, int] = []
    rows: list[int] = []


round_lines = msgspec.json.Decoder(RoundLine)
_tasks = msgspec.json.Decoder(_Task)


class Fold:
    """One run: its rounds so far, by column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path)
        self._clear()

    def _clear(self) -> None:
        self.columns = {name: array("d") for name in COLUMNS}
        self.places = array("q", [0])  # in the file, where each round's records begin

    def __len__(self) -> int:
        return len(self.columns["round"])

    def feed(self) -> bool:
        """Take in the next part of the file; tell whether there was something."""
        start = self._tail.offset
        is_cut, text = self._tail.look()
        if is_cut:
            self._clear()
            start = 0
        place = start
        for line in text.splitlines(keepends=True):
            place += len(line)
            if not line.startswith(TASK):
                self._take(line, place)
        return bool(text)

    def _take(self, raw: bytes, end: int) -> None:
        try:
            line = round_lines.decode(raw)
        except msgspec.DecodeError:
            return  # not a record of a run: nothing to show
        if line.type != "round":
            return
        totals = self.columns["macs"], self.columns["bytes"]
        before = [column[-1] if column else 0.0 for column in totals]
        values = (
            line.round + 1,
            line.seconds,
            before[0] + line.macs,
            before[1] + line.down + line.up,
            math.nan if line.accuracy is None else line.accuracy,
            math.nan if line.loss is None else line.loss,
            line.useful / line.available if line.available else math.nan,
            line.merged / line.tasks if line.tasks else math.nan,
        )
        for name, value in zip(COLUMNS, values, strict=True):
            self.columns[name].append(value)
        self.places.append(end)

    def since(self, place: int) -> dict[str, list[float | None]]:
        """Return the rounds from a place on, thinned to what a screen can show."""
        chosen = thinned(self.columns["accuracy"], place, POINTS)
        return {
            name: [_plain(column[at]) for at in chosen] for name, column in self.columns.items()
        }

    def timeline(self, last: int, count: int) -> dict[str, Any]:
        """Return when each mini-batch of some rounds ran; `last` is the number of the last one."""
        last = min(max(1, last), len(self))
        first = max(1, last - count + 1)
        rounds = [self._tasks(number) for number in range(first, last + 1)]
        return {"first": first, "last": last, "rounds": rounds, "known": len(self)}

    def _tasks(self, number: int) -> dict[str, Any]:
        seconds = self.columns["seconds"]
        opened = seconds[number - 2] if number > 1 else 0.0
        start, end = self.places[number - 1], self.places[number]
        text = read_part(self.path, start, min(end, start + BYTES))
        lines = [line for line in text.splitlines(keepends=True) if line.startswith(TASK)]
        found = []
        for line in lines[:TASKS]:
            try:
                found.append(_shown(_tasks.decode(line), seconds[number - 1] - opened))
            except msgspec.DecodeError:
                continue  # cut short at the limit of bytes
        is_whole = start + BYTES >= end and len(lines) <= TASKS
        closed = seconds[number - 1]
        return {"opened": opened, "closed": closed, "tasks": found, "whole": is_whole}


def _shown(task: _Task, length: float) -> dict[str, Any]:
    ends = task.ends if isinstance(task.ends, list) else []
    if len(task.starts) > len(ends):  # the last mini-batch was cut off
        limit = min(length, task.starts[0] + task.seconds)
        ends = [*ends, *[max(limit, task.starts[-1])] * (len(task.starts) - len(ends))]
    starts = [round(at, 6) for at in task.starts]
    stops = [round(at, 6) for at in ends]
    return {
        "device": task.device,
        "end": task.end,
        "starts": starts,
        "ends": stops,
        "rows": task.rows,
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def thinned(values: "array[float]", first: int, most: int) -> list[int]:
    """Return at most so many places: of each stretch the last one with a value, else the last.

    >>> from array import array
    >>> from pliant.dashboard.fold import thinned
    >>> thinned(array("d", [0.1, float("nan"), 0.3, float("nan")]), 0, 2)
    [0, 3]
    """
    count = len(values) - first
    if count <= most:
        return list(range(first, len(values)))
    edges = [first + count * part // most for part in range(most + 1)]
    found = []
    for low, high in pairwise(edges):
        known = (at for at in range(high - 1, low - 1, -1) if math.isfinite(values[at]))
        found.append(next(known, high - 1))
    found[-1] = len(values) - 1  # the page goes on from here
    return found
