"""The ledger: what every dispatched task cost and how it ended, and a proof that sums agree."""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby, pairwise
from math import isclose

from msgspec import Struct

from pliant.engine.evaluate import Personal, Score


class Exchange(Struct, frozen=True, forbid_unknown_fields=True):
    """What the exchanges of a split method added to a task, or to a round."""

    forward: float  # MACs of the clients' forward passes, the only ones that AdaSplit counts
    server: float  # MACs of the server's forward passes
    uplinks: int  # messages
    dense: int  # bytes of activations and gradients at four a number
    nonzero: int  # bytes as AdaSplit counts them: four for each number that is not zero
    relayed: int  # bytes of clients' parts that went to another client or to be merged
    waited: float  # seconds, virtual
    refused: dict[str, int]  # messages that were refused, by the reason


class TaskRecord(Struct, frozen=True, forbid_unknown_fields=True, tag="task"):
    """One task: a device in a round. It has exactly one end.

    >>> import pliant as pl
    >>> task = pl.TaskRecord(0, 7, "late", 0, 0, 5e6, 0.0, 9e6, 1000, 0, 1.0, 0.0)
    >>> task.device, task.end, task.useful
    (7, 'late', 0.0)
    """

    round: int
    device: int
    end: str  # finished, partial, late, dropped, surplus, void, or rejected: why
    samples: int  # that the server got something of
    steps: int  # mini-batches that the server got
    macs: float  # spent
    useful: float  # MACs of what the server got
    available: float  # MACs that the device could have done
    down: int  # bytes
    up: int
    seconds: float  # busy, virtual
    joules: float
    loss: float | None = None
    starts: tuple[float, ...] = ()  # of its mini-batches, since the round's start
    ends: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()  # of the method's table
    short: int = 0  # mini-batches whose budget was below the smallest row, which was run anyway
    exchange: Exchange | None = None  # of a split method


class RoundRecord(Struct, frozen=True, forbid_unknown_fields=True, tag="round"):
    """One round: the sums over its tasks, the clock, and the score if it was evaluated.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.Images.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.Source(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> fleet = pl.Fleet(size=4)
    >>> net = pl.models.digits_cnn()
    >>> [record] = pl.simulate(pl.FedAvg(), net, data, fleet, rounds=1)
    >>> record.tasks, record.ends, record.seconds
    (4, {'finished': 4}, 1.0)
    """

    round: int
    seconds: float  # virtual, at the close of the round
    tasks: int
    merged: int
    ends: dict[str, int]  # how many tasks ended how; the reasons of rejections are the tasks'
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
    narrow: Score | None = None  # without the filters that were never trained, if there are any
    digest: str | None = None  # of the network, where it was saved
    exchange: Exchange | None = None  # of a split method
    personal: Personal | None = None  # where devices have test images of their own
    asked: float | None = None  # seconds at which real devices got their orders

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy, if the network was evaluated: the mean over devices' own tests."""
        if self.personal is not None:
            return self.personal.accuracy
        return None if self.score is None else self.score.accuracy

    @property
    def utilisation(self) -> float:
        """Return useful MACs over available ones."""
        return self.useful / self.available if self.available else 0.0


Record = TaskRecord | RoundRecord

MERGED = ("finished", "partial")
EXACT = ("tasks", "merged", "ends", "samples", "steps", "down", "up", "exchange")
CLOSE = ("macs", "useful", "available", "busy", "joules", "loss")


def summed(number: int, seconds: float, tasks: list[TaskRecord]) -> RoundRecord:
    """Return the record of a round: the sums over its tasks."""
    merged = [task for task in tasks if task.end in MERGED]
    losses = [task.loss for task in merged if task.loss is not None]
    return RoundRecord(
        round=number,
        seconds=seconds,
        tasks=len(tasks),
        merged=len(merged),
        ends=dict(sorted(Counter(task.end.partition(":")[0] for task in tasks).items())),
        samples=sum(task.samples for task in tasks),
        steps=sum(task.steps for task in tasks),
        macs=sum(task.macs for task in tasks),
        useful=sum(task.useful for task in tasks),
        available=sum(task.available for task in tasks),
        down=sum(task.down for task in tasks),
        up=sum(task.up for task in tasks),
        busy=sum(task.seconds for task in tasks),
        joules=sum(task.joules for task in tasks),
        loss=sum(losses) / len(losses) if losses else None,
        exchange=_exchanged([task.exchange for task in tasks if task.exchange is not None]),
    )


def _exchanged(parts: list[Exchange]) -> Exchange | None:
    if not parts:
        return None
    refused: Counter[str] = Counter()
    for part in parts:
        refused.update(part.refused)
    return Exchange(
        forward=sum(part.forward for part in parts),
        server=sum(part.server for part in parts),
        uplinks=sum(part.uplinks for part in parts),
        dense=sum(part.dense for part in parts),
        nonzero=sum(part.nonzero for part in parts),
        relayed=sum(part.relayed for part in parts),
        waited=sum(part.waited for part in parts),
        refused=dict(refused),
    )


def check(records: Iterable[Record]) -> int:
    """Prove that a run's records agree, and return its number of rounds.

    Rounds follow one another without a gap and the clock never goes back; each task has one end;
    what a task's server got is not more than the device spent, nor that more than there was; its
    mini-batches follow one another and fill the time that it was busy; and the sums of a round are
    those of its tasks.
    """
    rounds, clock = 0, 0.0
    for _, group in groupby(records, key=lambda record: record.round):
        members = list(group)
        tasks = [record for record in members if isinstance(record, TaskRecord)]
        totals = [record for record in members if isinstance(record, RoundRecord)]
        if len(totals) != 1 or not isinstance(members[-1], RoundRecord):
            raise ValueError(
                f"round {rounds}: expected one record of it behind its tasks, got {len(totals)}"
            )
        total = totals[0]
        _check_round(total, tasks, rounds, clock)
        rounds, clock = rounds + 1, total.seconds
    return rounds


def _check_round(total: RoundRecord, tasks: list[TaskRecord], number: int, clock: float) -> None:
    where = f"round {total.round}"
    if total.round != number:
        raise ValueError(f"Expected round {number}, got {total.round}")
    if not total.seconds >= clock:
        raise ValueError(f"{where}: the clock went back from {clock} to {total.seconds}")
    if total.asked is not None and not clock <= total.asked <= total.seconds:
        raise ValueError(f"{where}: devices were asked at {total.asked} s, outside of the round")
    devices = [task.device for task in tasks]
    if any(after <= before for before, after in pairwise([-1, *devices])):
        raise ValueError(f"{where}: expected one end a device, in rising order, got {devices}")
    for task in tasks:
        _check_task(f"{where}, device {task.device}", task)
        if task.exchange is None:  # the mini-batches of a split method wait for one another
            _check_steps(f"{where}, device {task.device}", task, clock, total.seconds)
    wanted = summed(total.round, total.seconds, tasks)
    for name in (*EXACT, *CLOSE):
        left, right = getattr(total, name), getattr(wanted, name)
        is_close = name in CLOSE and None not in (left, right)
        if not (isclose(left, right, rel_tol=1e-12) if is_close else left == right):
            raise ValueError(f"{where}: {name} is {left}, its tasks say {right}")


def _check_task(where: str, task: TaskRecord) -> None:
    slack = 1e-9 * max(1.0, task.available)
    if not 0 <= task.useful <= task.macs + slack:
        raise ValueError(f"{where}: got {task.useful} MACs of use out of {task.macs} spent")
    if task.macs > task.available + slack:
        raise ValueError(f"{where}: spent {task.macs} MACs where there were {task.available}")
    if min(task.down, task.up, task.joules, task.seconds) < 0:
        raise ValueError(f"{where}: a cost is below zero")
    is_merged = task.end in MERGED
    if is_merged != (task.steps > 0) or is_merged != (task.samples > 0):
        raise ValueError(
            f"{where}: ended {task.end} with {task.steps} steps and {task.samples} samples"
        )
    if is_merged != (task.useful > 0):
        raise ValueError(f"{where}: ended {task.end} with {task.useful} useful MACs")


def _check_steps(where: str, task: TaskRecord, opened: float, closed: float) -> None:
    """Refuse mini-batches that overlap, leave gaps or do not add up to the busy time."""
    begun, done = len(task.starts), len(task.ends)
    if len(task.rows) != begun or not begun - 1 <= done <= begun or task.steps not in (0, done):
        raise ValueError(
            f"{where}: {task.steps} steps count of {begun} begun in {len(task.rows)} rows, "
            f"{done} ended"
        )
    if task.starts[1:] != task.ends[: max(0, begun - 1)]:
        raise ValueError(f"{where}: a mini-batch does not begin where the one before it ends")
    if task.end == "finished" and done != begun:
        raise ValueError(f"{where}: finished, but its last mini-batch has no end")
    times = [t for pair in zip(task.starts, task.ends, strict=False) for t in pair]
    length, slack = closed - opened, 1e-9 * max(1.0, closed)
    if any(after < before for before, after in pairwise([0.0, *times])):
        raise ValueError(f"{where}: a mini-batch ends before it begins")
    if any(time > length + slack for time in times):
        raise ValueError(f"{where}: a mini-batch ends after its round, which has {length} s")
    worked = times[-1] - times[0] if times else 0.0
    if task.seconds < worked - slack or (
        task.end == "finished" and not isclose(task.seconds, worked, rel_tol=1e-9, abs_tol=slack)
    ):
        raise ValueError(f"{where}: was busy for {task.seconds} s with {worked} s of mini-batches")
