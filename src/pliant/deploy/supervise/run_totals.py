"""What a run has done so far, in total and per device, read from its records as they grow."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pliant.engine.ledger import Record, RoundRecord, TaskRecord
from pliant.engine.run_store import EVENTS_FILE
from pliant.storage import formats
from pliant.storage.jsonl import JsonlHeader
from pliant.storage.tail import FileTail

# upper ends in seconds; the steps of small devices take milliseconds, of large networks seconds
STEP_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class DeviceTotals:
    """The tasks of one device."""

    outcomes: Counter[str] = field(default_factory=Counter)  # without reasons
    last_round: int = 0
    last_outcome: str = ""  # with its reason
    macs: float = 0.0
    seconds: float = 0.0  # busy
    rows: tuple[int, ...] = ()  # of its last task with mini-batches

    @property
    def speed(self) -> float | None:
        """Return MACs per second while it was busy."""
        return self.macs / self.seconds if self.seconds else None


@dataclass
class RunTotals:
    """The rounds and tasks of a run."""

    rounds: int = 0
    merged_rounds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)  # bytes: down, up and control
    last_round: RoundRecord | None = None
    accuracy: float | None = None  # of the last round that was evaluated
    devices: dict[int, DeviceTotals] = field(default_factory=dict)
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    step_seconds: float = 0.0

    def add(self, record: Record) -> None:
        """Add a record."""
        if isinstance(record, TaskRecord):
            self._add_task(record)
            return
        self.rounds += 1
        self.merged_rounds += record.merged > 0
        self.last_round = record
        self.accuracy = self.accuracy if record.accuracy is None else record.accuracy

    def _add_task(self, task: TaskRecord) -> None:
        device = self.devices.setdefault(task.device, DeviceTotals())
        outcome = task.outcome.partition(":")[0]
        device.outcomes[outcome] += 1
        self.outcomes[outcome] += 1
        device.last_round, device.last_outcome = task.round, " ".join(task.outcome.split())
        device.macs, device.seconds = device.macs + task.macs, device.seconds + task.seconds
        device.rows = task.rows or device.rows
        self.sent.update(down=task.down, up=task.up, control=task.control)
        for start, end in zip(task.starts, task.ends, strict=False):
            self.step_seconds += end - start
            self.step_counts[sum(end - start > limit for limit in STEP_BUCKETS)] += 1


class TotalsReader:
    """Add up the records of a run; each is read once."""

    def __init__(self, folder: Path) -> None:
        self._tail = FileTail(folder / EVENTS_FILE)
        self._decoder = msgspec.json.Decoder(Record | JsonlHeader)
        self._totals = RunTotals()

    def read(self) -> RunTotals:
        """Return the totals of all records so far."""
        while True:
            is_cut, lines = self._tail.read_new_lines()
            if is_cut:  # a resumed run has dropped records and written others
                self._totals = RunTotals()
            if not lines:
                return self._totals
            for record in map(self._decoder.decode, lines.splitlines()):
                if isinstance(record, JsonlHeader):
                    formats.RECORDS.check(record.format, self._tail.path)
                else:
                    self._totals.add(record)
