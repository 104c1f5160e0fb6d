"""The log of short trainings: append-only lines, each with a digest, from which a search resumes.

A restarted search makes the same requests in the same order and finds the results here. A line that
does not match its digest is ignored, and its training runs again.
"""

from hashlib import blake2b
from pathlib import Path

import msgspec

from pliant.storage import formats
from pliant.storage.jsonl import JsonlWriter, check_header
from pliant.table_search.short_training import Trial, TrialOutcome

TRIALS_FILE = "trials.jsonl"


class TrialRecord(msgspec.Struct, frozen=True):
    """One short training, its result, and a digest of both."""

    context: str  # digest of network, objective, data and snapshot
    rates: tuple[float, ...]
    seed: int
    accuracy: float
    loss: float
    check: str = ""
    # expected MACs of a training step as a share of the full network's; older files lack it
    cost: float | msgspec.UnsetType = msgspec.UNSET
    side: int | msgspec.UnsetType = msgspec.UNSET  # of the images; unset: as they are
    batch: float | msgspec.UnsetType = msgspec.UNSET  # share of the samples; unset: all

    @property
    def trial(self) -> Trial:
        side = None if self.side is msgspec.UNSET else self.side
        batch = 1.0 if self.batch is msgspec.UNSET else self.batch
        return Trial(self.rates, self.seed, side, batch)

    def add_check(self) -> "TrialRecord":
        plain = msgspec.structs.replace(self, check="")
        check = blake2b(msgspec.json.encode(plain), digest_size=8).hexdigest()
        return msgspec.structs.replace(self, check=check)


class TrialLog:
    """Results of short trainings, in memory and, with a folder, on disk."""

    def __init__(self, context: str, folder: Path | None = None) -> None:
        self.context = context
        self.outcomes: dict[Trial, TrialOutcome] = {}
        self._writer: JsonlWriter | None = None
        if folder is not None:
            for record in read_trials(folder / TRIALS_FILE):
                if record.context == context:
                    self.outcomes[record.trial] = TrialOutcome(record.accuracy, record.loss)
            self._writer = JsonlWriter(folder / TRIALS_FILE, formats.TRIALS)

    def put(self, trial: Trial, outcome: TrialOutcome, cost: float) -> None:
        """Store the outcome of a trial; the cost is for readers of the file."""
        self.outcomes[trial] = outcome
        if self._writer is not None:
            values = (trial.rates, trial.seed, outcome.accuracy, outcome.loss)
            side = msgspec.UNSET if trial.side is None else trial.side
            batch = msgspec.UNSET if trial.batch == 1.0 else trial.batch
            record = TrialRecord(self.context, *values, cost=cost, side=side, batch=batch)
            self._writer.append(record.add_check())

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_trials(path: Path) -> list[TrialRecord]:
    """Read the records of a file that match their digests."""
    records: list[TrialRecord] = []
    decoder = msgspec.json.Decoder(TrialRecord)
    if not path.exists():
        return records
    with open(path, "rb") as file:
        check_header(file, path, formats.TRIALS)
        for line in file:
            try:
                record = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if record.add_check() == record:
                records.append(record)
    return records
