"""What a run has done so far, in total and per device, read from its records as they grow.

Pages read it too, so importing this does not load torch.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pliant.engine.record_fields import (
    EVENTS,
    RoundFields,
    TaskFields,
    decode_round,
    decode_task,
)
from pliant.storage import formats
from pliant.storage.jsonl import JsonlHeader
from pliant.storage.tail import FileTail

# upper ends in seconds; the steps of small devices take milliseconds, of large networks seconds
STEP_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
HEADER_PREFIX = b'{"type":"header"'


@dataclass
class DeviceTotals:
    """The tasks of one device."""

    outcomes: Counter[str] = field(default_factory=Counter)  # without reasons
    last_round: int = 0
    last_outcome: str = ""  # with its reason
    # of its last task with mini-batches
    speed: float | None = None  # MAC/s
    rows: tuple[int, int] | None = None  # first and last


@dataclass
class RunTotals:
    """The rounds and tasks of a run."""

    rounds: int = 0
    merged_rounds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)  # bytes: down, up and control
    last_round: RoundFields | None = None
    accuracy: float | None = None  # of the last round that was evaluated
    devices: dict[int, DeviceTotals] = field(default_factory=dict)
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    step_seconds: float = 0.0

    def add_round(self, record: RoundFields) -> None:
        self.rounds += 1
        self.merged_rounds += record.merged > 0
        self.last_round = record
        self.accuracy = self.accuracy if record.accuracy is None else record.accuracy

    def add_task(self, task: TaskFields) -> None:
        device = self.devices.setdefault(task.device, DeviceTotals())
        outcome = task.outcome.partition(":")[0]
        device.outcomes[outcome] += 1
        self.outcomes[outcome] += 1
        device.last_round, device.last_outcome = task.round, " ".join(task.outcome.split())
        if task.seconds:
            device.speed = task.macs / task.seconds
        if task.rows:
            device.rows = min(task.rows), max(task.rows)
        self.sent.update(down=task.down, up=task.up, control=task.control)
        for start, end in zip(task.starts, task.ends, strict=False):
            self.step_seconds += end - start
            self.step_counts[sum(end - start > limit for limit in STEP_BUCKETS)] += 1


class TotalsReader:
    """Add up the records of a run; each is read once."""

    def __init__(self, folder: Path) -> None:
        self._tail = FileTail(folder / EVENTS)
        self.totals = RunTotals()

    def read(self) -> RunTotals:
        """Return the totals of all records so far."""
        while self.read_more():
            pass
        return self.totals

    def read_more(self) -> bool:
        """Add the next part of the file and return whether there was one."""
        is_cut, lines = self._tail.read_new_lines()
        if is_cut:  # a resumed run has dropped records and written others
            self.totals = RunTotals()
        for line in lines.splitlines(keepends=True):
            if (task := decode_task(line)) is not None:
                self.totals.add_task(task)
            elif (record := decode_round(line)) is not None:
                self.totals.add_round(record)
            elif line.startswith(HEADER_PREFIX):
                header = msgspec.json.decode(line, type=JsonlHeader)
                formats.RECORDS.check(header.format, self._tail.path)
        return bool(lines)
