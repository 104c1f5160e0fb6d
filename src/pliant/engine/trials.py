"""The record of short trainings: append-only lines that are the search's memory, each with a check.

A search that is started again asks the same things in the same order and finds the answers here, so
this file is all that it needs in order to go on. A line that does not match its check is left out,
and its training is done again.
"""

from hashlib import blake2b
from pathlib import Path

import msgspec

from pliant.explore.objective import Outcome, Trial
from pliant.record import Records

NAME = "trials.jsonl"


class Line(msgspec.Struct, frozen=True):
    """One short training: what it was, what it came to, and a digest of both."""

    context: str  # network, objective, data and snapshot
    rates: tuple[float, ...]
    seed: int
    accuracy: float
    loss: float
    check: str = ""
    # expected MACs of a training step / the full network's; older files do not have it
    cost: float | msgspec.UnsetType = msgspec.UNSET

    def signed(self) -> "Line":
        """Return the line with its digest."""
        plain = msgspec.structs.replace(self, check="")
        told = blake2b(msgspec.json.encode(plain), digest_size=8).hexdigest()
        return msgspec.structs.replace(self, check=told)


class Trials:
    """What short trainings came to, in memory and, with a folder, on disk."""

    def __init__(self, context: str, folder: Path | None = None) -> None:
        self.context = context
        self._known: dict[Trial, Outcome] = {}
        self._records: Records | None = None
        if folder is not None:
            for line in read_trials(folder / NAME):
                if line.context == context:
                    trial = Trial(line.rates, line.seed)
                    self._known[trial] = Outcome(line.accuracy, line.loss)
            self._records = Records(folder / NAME)

    def get(self, trial: Trial) -> Outcome | None:
        """Return what a trial came to, if it is known."""
        return self._known.get(trial)

    def put(self, trial: Trial, outcome: Outcome, cost: float) -> None:
        """Remember what a trial came to; its cost is told to whoever reads the file."""
        self._known[trial] = outcome
        if self._records is not None:
            line = Line(
                self.context,
                trial.rates,
                trial.seed,
                outcome.accuracy,
                outcome.loss,
                cost=cost,
            )
            self._records.append(line.signed())

    def close(self) -> None:
        """Close the file."""
        if self._records is not None:
            self._records.close()


def read_trials(path: Path) -> list[Line]:
    """Read the lines of a file that match their checks."""
    found = []
    decoder = msgspec.json.Decoder(Line)
    for raw in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if line.signed() == line:
            found.append(line)
    return found
