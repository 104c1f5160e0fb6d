"""The ledger: what each task cost and how it ended, and a check that the records agree."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import isclose
from typing import Any

import msgspec
from msgspec import Struct

from pliant.engine.device_scores import DeviceScores
from pliant.engine.evaluation import PersonalScore, Score
from pliant.html_table import make_html_table

MAX_SHOWN = 3  # items of a list in a short text


class ExchangeRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """What the exchanges of a split method add to a task or a round."""

    forward: float  # MACs of the clients' forward passes, all that AdaSplit counts
    server: float  # MACs of the server's forward passes
    uplinks: int  # messages
    dense: int  # bytes of activations and gradients, four per number
    nonzero: int  # the same as AdaSplit counts it: nonzero numbers only
    relayed: int  # bytes of clients' parts sent to another client or to be merged
    waited: float  # seconds, virtual
    refused: dict[str, int]  # messages refused, by reason


class TaskRecord(Struct, frozen=True, forbid_unknown_fields=True, tag="task"):
    """One task, a device's work in a round, with its one outcome.

    >>> import pliant as pl
    >>> task = pl.TaskRecord(0, 7, "late", 0, 0, 5e6, 0.0, 9e6, 1000, 0, 1.0, 0.0)
    >>> task.device, task.outcome, task.useful
    (7, 'late', 0.0)
    """

    round: int
    device: int
    outcome: str  # finished, partial, late, dropped, surplus, void, or "rejected: <reason>"
    samples: int  # in the merged update
    steps: int  # mini-batches in the merged update
    macs: float  # spent
    useful: float  # MACs of the merged update
    available: float  # MACs that the device could have computed
    down: int  # bytes
    up: int
    seconds: float  # busy, virtual
    joules: float
    loss: float | None = None
    starts: tuple[float, ...] = ()  # of its mini-batches, if recorded, since the round's start
    ends: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()  # of the method's table, one per mini-batch
    short: int = 0  # mini-batches run on the smallest row although the budget was below it
    exchange: ExchangeRecord | None = None  # of a split method
    # of asynchronous runs, where a round is a version of the network; times count from `sent_at`
    sent_at: float | None = None  # seconds of the run
    staleness: int | None = None  # versions since it was sent
    control: int = 0  # bytes in both directions beyond `down` and `up`: headers, requests, digests

    def __repr__(self) -> str:
        return _shorten_record(self)

    def _repr_html_(self) -> str:
        return make_html_table(type(self).__name__, (), _list_known(self))


class RoundRecord(Struct, frozen=True, forbid_unknown_fields=True, tag="round"):
    """One round: sums over its tasks, the clock, and the score if it was evaluated.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.ImageDataset.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.TrainTestData(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> fleet = pl.Fleet(size=4)
    >>> net = pl.models.digits_cnn()
    >>> [record] = pl.simulate(pl.FedAvg(), net, data, fleet, rounds=1)
    >>> record.tasks, record.outcomes, record.seconds
    (4, {'finished': 4}, 1.0)
    """

    round: int
    seconds: float  # virtual, at the close of the round
    tasks: int
    merged: int
    outcomes: dict[str, int]  # number of tasks by outcome, without the reasons for rejection
    samples: int
    steps: int
    macs: float
    useful: float
    available: float
    down: int
    up: int
    busy: float  # seconds, virtual
    joules: float
    loss: float | None = None  # mean over merged devices
    score: Score | None = None
    trained_score: Score | None = None  # without untrained filters, at `side`, if either differs
    digest: str | None = None  # of the final network
    exchange: ExchangeRecord | None = None  # of a split method
    personal: PersonalScore | None = None  # if devices have their own test images
    dispatched_at: float | None = None  # seconds at which real devices got their requests
    side: int | None = None  # of the largest training images, if they were scaled down
    staleness: float | None = None  # mean over merged updates, in an asynchronous run
    on_devices: DeviceScores | None = None  # if devices tested the network themselves
    control: int = 0  # bytes in both directions beyond `down` and `up`
    epsilon: float | None = None  # of differential privacy so far; None: not private
    server_macs: float = 0.0  # of distillation; they take no virtual time

    def __repr__(self) -> str:
        return _shorten_record(self)

    def _repr_html_(self) -> str:
        return make_html_table(type(self).__name__, (), _list_known(self))

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy if evaluated; the mean over devices if they have their own tests."""
        scores = self.personal or self.score or self.on_devices
        return None if scores is None else scores.accuracy

    @property
    def sent(self) -> int:
        """Return all bytes of the round, in both directions: tests on devices included."""
        tests = [scores.sent for scores in (self.personal, self.on_devices) if scores is not None]
        return self.down + self.up + self.control + sum(tests)

    @property
    def utilisation(self) -> float:
        """Return the useful share of the available MACs."""
        return self.useful / self.available if self.available else 0.0


Record = TaskRecord | RoundRecord


def _list_known(record: Record) -> list[tuple[str, str]]:
    """Return the fields that differ from their default as text, with long lists shortened."""
    known = []
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if value == field.default:
            continue
        if isinstance(value, tuple) and len(value) > MAX_SHOWN:
            shown = ", ".join(f"{item:.6g}" for item in value[:MAX_SHOWN])
            text = f"({shown}, … {len(value)} in all)"
        else:
            text = f"{value:.6g}" if isinstance(value, float) else repr(value)
        known.append((field.name, text))
    return known


def _shorten_record(record: Record) -> str:
    fields = ", ".join(f"{name}={text}" for name, text in _list_known(record))
    return f"{type(record).__name__}({fields})"


MERGED_OUTCOMES = ("finished", "partial")
SUMMED_FIELDS = (
    "samples", "steps", "macs", "useful", "available", "down", "up", "control", "joules"
)  # fmt: skip
EXACT_FIELDS = (
    "tasks", "merged", "outcomes", "samples", "steps", "down", "up", "control", "exchange"
)  # fmt: skip
APPROXIMATE_FIELDS = ("macs", "useful", "available", "busy", "joules", "loss", "staleness")


def sum_tasks(round_number: int, seconds: float, tasks: list[TaskRecord]) -> RoundRecord:
    """Return the record of a round: sums over its tasks."""
    merged = [task for task in tasks if task.outcome in MERGED_OUTCOMES]
    losses = [task.loss for task in merged if task.loss is not None]
    return RoundRecord(
        round=round_number,
        seconds=seconds,
        tasks=len(tasks),
        merged=len(merged),
        outcomes=dict(sorted(Counter(task.outcome.partition(":")[0] for task in tasks).items())),
        busy=sum(task.seconds for task in tasks),
        loss=sum(losses) / len(losses) if losses else None,
        staleness=_average_staleness(tasks, merged),
        exchange=_sum_exchanges([task.exchange for task in tasks if task.exchange is not None]),
        **_sum_fields(tasks, SUMMED_FIELDS),
    )


def _average_staleness(tasks: list[TaskRecord], merged: list[TaskRecord]) -> float | None:
    if all(task.staleness is None for task in tasks):
        return None
    return sum(task.staleness or 0 for task in merged) / max(1, len(merged))


def _sum_exchanges(exchanges: list[ExchangeRecord]) -> ExchangeRecord | None:
    if not exchanges:
        return None
    refused: Counter[str] = Counter()
    for exchange in exchanges:
        refused.update(exchange.refused)
    names = [name for name in ExchangeRecord.__struct_fields__ if name != "refused"]
    return ExchangeRecord(refused=dict(refused), **_sum_fields(exchanges, names))


def _sum_fields(records: Sequence[Struct], names: Sequence[str]) -> dict[str, Any]:
    return {name: sum(getattr(record, name) for record in records) for name in names}


def verify_records(records: Iterable[Record]) -> int:
    """Check that a run's records agree, and return its number of rounds.

    Rounds follow without a gap and the clock never goes back. Each task has one outcome, with
    useful MACs <= spent MACs <= available MACs, and its mini-batches, if they are recorded, fill
    its busy time without gaps. A round's totals are the sums over its tasks. In an asynchronous
    run, a device has one task at a time, and staleness counts the versions in between.
    """
    rounds, clock = 0, 0.0
    versions: list[float] = []  # when they were merged
    idle_from: dict[int, float] = {}  # since the device's last task, in asynchronous runs
    for _, group in groupby(records, key=lambda record: record.round):
        members = list(group)
        tasks = [record for record in members if isinstance(record, TaskRecord)]
        totals = [record for record in members if isinstance(record, RoundRecord)]
        if len(totals) != 1 or not isinstance(members[-1], RoundRecord):
            raise ValueError(
                f"round {rounds}: expected one round record after its tasks, got {len(totals)}"
            )
        _check_versions(tasks, versions, idle_from)
        _check_round(totals[0], tasks, rounds, clock)
        rounds, clock = rounds + 1, totals[0].seconds
        versions.append(clock)
    return rounds


def _check_round(
    record: RoundRecord, tasks: list[TaskRecord], round_number: int, start: float
) -> None:
    where = f"round {record.round}"
    if record.round != round_number:
        raise ValueError(f"Expected round {round_number}, got {record.round}")
    if not record.seconds >= start:
        raise ValueError(f"{where}: the clock went back from {start} to {record.seconds}")
    if record.dispatched_at is not None and not start <= record.dispatched_at <= record.seconds:
        raise ValueError(
            f"{where}: requests were sent at {record.dispatched_at} s, outside the round"
        )
    devices = [task.device for task in tasks]
    keys = [(task.device, -1.0 if task.sent_at is None else task.sent_at) for task in tasks]
    if any(after <= before for before, after in pairwise([(-1, 0.0), *keys])):
        raise ValueError(f"{where}: expected one task per device, in rising order, got {devices}")
    has_steps = any(task.starts for task in tasks)  # else they were not recorded
    for task in tasks:
        _check_task(f"{where}, device {task.device}", task)
        # the mini-batches of a split method wait for one another
        if has_steps and task.exchange is None:
            sent_at = start if task.sent_at is None else task.sent_at
            _check_steps(f"{where}, device {task.device}", task, sent_at, record.seconds)
    expected = sum_tasks(record.round, record.seconds, tasks)
    for name in (*EXACT_FIELDS, *APPROXIMATE_FIELDS):
        left, right = getattr(record, name), getattr(expected, name)
        is_close = name in APPROXIMATE_FIELDS and None not in (left, right)
        if not (isclose(left, right, rel_tol=1e-12) if is_close else left == right):
            raise ValueError(f"{where}: {name} is {left}, but its tasks give {right}")


def _check_versions(
    tasks: list[TaskRecord], versions: list[float], idle_from: dict[int, float]
) -> None:
    """Raise if tasks of a device overlap, or if a staleness is not the versions that passed."""
    for task in tasks:
        if task.sent_at is None:
            continue
        where = f"round {task.round}, device {task.device}"
        passed = len(versions) - bisect_right(versions, task.sent_at)
        if task.staleness != passed:
            raise ValueError(
                f"{where}: {passed} versions passed, but staleness is {task.staleness}"
            )
        if task.sent_at < idle_from.get(task.device, 0.0) - 1e-8 * max(1.0, task.sent_at):
            raise ValueError(f"{where}: was sent a task before the one before it ended")
        idle_from[task.device] = task.sent_at + task.seconds


def _check_task(where: str, task: TaskRecord) -> None:
    slack = 1e-9 * max(1.0, task.available)
    if not 0 <= task.useful <= task.macs + slack:
        raise ValueError(f"{where}: {task.useful} useful MACs out of {task.macs} spent")
    if task.macs > task.available + slack:
        raise ValueError(f"{where}: spent {task.macs} MACs of {task.available} available")
    if min(task.down, task.up, task.control, task.joules, task.seconds) < 0:
        raise ValueError(f"{where}: a cost is negative")
    is_merged = task.outcome in MERGED_OUTCOMES
    if is_merged != (task.steps > 0) or is_merged != (task.samples > 0):
        raise ValueError(
            f"{where}: {task.outcome} with {task.steps} steps and {task.samples} samples"
        )
    if is_merged != (task.useful > 0):
        raise ValueError(f"{where}: {task.outcome} with {task.useful} useful MACs")


def _check_steps(where: str, task: TaskRecord, round_start: float, round_end: float) -> None:
    """Raise if mini-batches overlap, leave gaps or do not add up to the busy time."""
    started, done = len(task.starts), len(task.ends)
    if (
        len(task.rows) != started
        or not started - 1 <= done <= started
        or task.steps not in (0, done)
    ):
        raise ValueError(
            f"{where}: {task.steps} steps merged, {started} started, {done} ended, "
            f"{len(task.rows)} rows"
        )
    if task.starts[1:] != task.ends[: max(0, started - 1)]:
        raise ValueError(f"{where}: a mini-batch does not start when the one before it ends")
    if task.outcome == "finished" and done != started:
        raise ValueError(f"{where}: finished, but its last mini-batch has no end")
    times = [t for pair in zip(task.starts, task.ends, strict=False) for t in pair]
    length, slack = round_end - round_start, 1e-9 * max(1.0, round_end)
    if any(after < before for before, after in pairwise([0.0, *times])):
        raise ValueError(f"{where}: a mini-batch ends before it starts")
    if any(time > length + slack for time in times):
        raise ValueError(f"{where}: a mini-batch ends after its round of {length} s")
    worked = times[-1] - times[0] if times else 0.0
    if task.seconds < worked - slack or (
        task.outcome == "finished"
        and not isclose(task.seconds, worked, rel_tol=1e-9, abs_tol=slack)
    ):
        raise ValueError(f"{where}: busy for {task.seconds} s with {worked} s of mini-batches")
