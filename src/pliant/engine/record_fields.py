"""The fields of records that pages, figures, tables and monitors show.

Every field is optional, so that any kind of run can be read; damaged lines are ignored. Importing
this does not load torch.
"""

import msgspec

from pliant.engine.device_scores import DeviceScores

EVENTS = "events.jsonl"
ROUND_PREFIX, TASK_PREFIX = b'{"type":"round"', b'{"type":"task"'


class ScoreFields(msgspec.Struct):
    """Accuracy and loss on the test images."""

    accuracy: float | None = None
    loss: float | None = None


class PersonalFields(msgspec.Struct):
    """Accuracy on the devices' own tests."""

    per_device: list[float | None] = []
    after_training: list[float | None] = []
    sent: int = 0

    @property
    def local_accuracy(self) -> float | None:
        """Return the mean after local training, over the devices whose updates were merged."""
        accuracies = [accuracy for accuracy in self.after_training if accuracy is not None]
        return sum(accuracies) / len(accuracies) if accuracies else None


class ExchangeFields(msgspec.Struct):
    """Costs of a split method: MACs forward and on the server, bytes of nonzero numbers."""

    forward: float = 0.0
    server: float = 0.0
    nonzero: float = 0.0


class RoundFields(msgspec.Struct):
    """One round."""

    round: int = 0
    seconds: float = 0.0
    tasks: int = 0
    merged: int = 0
    outcomes: dict[str, int] = {}
    samples: int = 0
    steps: int = 0
    macs: float = 0.0
    useful: float = 0.0
    available: float = 0.0
    down: float = 0.0
    up: float = 0.0
    control: float = 0.0
    busy: float = 0.0
    joules: float = 0.0
    loss: float | None = None
    score: ScoreFields | None = None
    trained_score: ScoreFields | None = None
    side: int | None = None
    digest: str | None = None
    staleness: float | None = None
    exchange: ExchangeFields | None = None
    personal: PersonalFields | None = None
    on_devices: DeviceScores | None = None
    epsilon: float | None = None
    server_macs: float = 0.0

    @property
    def accuracy(self) -> float | None:
        """Return the mean of the devices' own tests if there is one, else the test accuracy."""
        per_device = [] if self.personal is None else self.personal.per_device
        accuracies = [accuracy for accuracy in per_device if accuracy is not None]
        if accuracies:
            return sum(accuracies) / len(accuracies)
        if self.score is not None:
            return self.score.accuracy
        return None if self.on_devices is None else self.on_devices.accuracy

    @property
    def control_bytes(self) -> float:
        """Return the bytes beyond `down` and `up`: of control and of tests on devices."""
        tests = [scores.sent for scores in (self.personal, self.on_devices) if scores is not None]
        return self.control + sum(tests)

    @property
    def test_loss(self) -> float | None:
        return self.score.loss if self.score else None


class TaskFields(msgspec.Struct):
    """One task; the times of its mini-batches count from the round's start, or from `sent_at`."""

    round: int = 0
    device: int = 0
    outcome: str = ""
    macs: float = 0.0
    down: int = 0
    up: int = 0
    control: int = 0
    seconds: float = 0.0
    starts: list[float] = []
    ends: list[float] = []
    rows: list[int] = []
    sent_at: float | None = None  # in an asynchronous run

    def complete_ends(self, round_seconds: float) -> list[float]:
        """Return an end for every mini-batch; the last one may have been cut off."""
        if len(self.starts) <= len(self.ends):
            return self.ends
        limit = max(min(round_seconds, self.starts[0] + self.seconds), self.starts[-1])
        return self.ends + [limit] * (len(self.starts) - len(self.ends))


_round_decoder = msgspec.json.Decoder(RoundFields)
_task_decoder = msgspec.json.Decoder(TaskFields)


def decode_round(line: bytes) -> RoundFields | None:
    """Decode a line; None unless it is a complete record of a round."""
    if not (line.startswith(ROUND_PREFIX) and line.endswith(b"\n")):
        return None
    try:
        return _round_decoder.decode(line)
    except msgspec.DecodeError:
        return None


def decode_task(line: bytes) -> TaskFields | None:
    """Decode a line; None unless it is a complete record of a task."""
    try:
        return _task_decoder.decode(line) if line.startswith(TASK_PREFIX) else None
    except msgspec.DecodeError:
        return None
