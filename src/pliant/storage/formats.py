"""Format numbers: every file that pliant reads again carries one, and other numbers are refused."""

from dataclasses import dataclass
from pathlib import Path


class UnsupportedFormat(ValueError):
    """A file was written by an older or a newer pliant."""


@dataclass(frozen=True)
class FileFormat:
    """A kind of file, the format number that this version writes and reads, and a way out.

    Files of an `oldest` format and later are read too.

    >>> RECORDS.check(2, "events.jsonl")
    >>> RECORDS.check(None, "events.jsonl")
    Traceback (most recent call last):
    pliant.storage.formats.UnsupportedFormat: events.jsonl: expected records of format 2, got \
format 1 of an older pliant; run the experiment again in a new folder
    """

    name: str
    number: int
    advice: str
    oldest: int | None = None

    def check(self, number: object, path: Path | str) -> None:
        """Refuse a file with another number, or with none, as the first files had."""
        if isinstance(number, int) and (self.oldest or self.number) <= number <= self.number:
            return
        other = 1 if number is None else number
        is_newer = isinstance(other, int) and other > self.number
        raise UnsupportedFormat(
            f"{path}: expected {self.name} of format {self.number}, got format {other} of "
            + ("a newer pliant; upgrade pliant" if is_newer else f"an older pliant; {self.advice}")
        )


_RUN_AGAIN = "run the experiment again in a new folder"
RUN_CONFIG = FileFormat("a run", 2, _RUN_AGAIN)
RECORDS = FileFormat("records", 2, _RUN_AGAIN)
CHECKPOINT = FileFormat("a checkpoint", 2, _RUN_AGAIN)
TRIALS = FileFormat("trials", 2, "search again in a new folder")
TABLE = FileFormat("a table", 3, "search again with `pliant search`", oldest=2)
STEP_TIME_MODEL = FileFormat("a step-time model", 2, "measure again with `pliant bench profile`")
STEP_TIME_CURVE = FileFormat("a step-time curve", 2, "delete it: the device measures again")
MODEL = FileFormat("a model", 1, "export it again with `pliant model export`")
KEYS = FileFormat(
    "keys",
    3,
    "make new ones: the server's with `pliant deploy init`, a device's with `pliant device enrol`",
)
