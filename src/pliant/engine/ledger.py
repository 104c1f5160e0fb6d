"""The ledger: what every dispatched task cost and how it ended, and a proof that sums agree."""

from collections.abc import Iterable
from itertools import groupby
from math import isclose

from pliant.engine.evaluate import Score
from pliant.value import Value


class TaskRecord(Value, frozen=True, tag="task"):
    """One task: a device in a round. It has exactly one end."""

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


class RoundRecord(Value, frozen=True, tag="round"):
    """One round: the sums over its tasks, the clock, and the score if it was evaluated."""

    round: int
    seconds: float  # virtual, at the close of the round
    tasks: int
    merged: int
    macs: float
    useful: float
    available: float
    down: int
    up: int
    joules: float
    loss: float | None = None  # mean over merged devices
    score: Score | None = None
    digest: str | None = None  # of the network, where it was saved

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy, if the network was evaluated."""
        return None if self.score is None else self.score.accuracy

    @property
    def utilisation(self) -> float:
        """Return useful MACs over available ones."""
        return self.useful / self.available if self.available else 0.0


Record = TaskRecord | RoundRecord

MERGED = ("finished", "partial")


def summed(number: int, seconds: float, tasks: list[TaskRecord]) -> RoundRecord:
    """Return the record of a round: the sums over its tasks."""
    merged = [task for task in tasks if task.end in MERGED]
    losses = [task.loss for task in merged if task.loss is not None]
    return RoundRecord(
        round=number,
        seconds=seconds,
        tasks=len(tasks),
        merged=len(merged),
        macs=sum(task.macs for task in tasks),
        useful=sum(task.useful for task in tasks),
        available=sum(task.available for task in tasks),
        down=sum(task.down for task in tasks),
        up=sum(task.up for task in tasks),
        joules=sum(task.joules for task in tasks),
        loss=sum(losses) / len(losses) if losses else None,
    )


def check(records: Iterable[Record]) -> int:
    """Prove that a run's records agree, and return its number of rounds.

    Rounds follow one another without a gap and the clock never goes back; each task has one end;
    what a task's server got is not more than the device spent, nor that more than there was; and
    the sums of a round are those of its tasks.
    """
    rounds, clock = 0, 0.0
    for _, group in groupby(records, key=lambda record: record.round):
        members = list(group)
        tasks = [record for record in members if isinstance(record, TaskRecord)]
        totals = [record for record in members if isinstance(record, RoundRecord)]
        if len(totals) != 1 or not isinstance(members[-1], RoundRecord):
            raise ValueError(f"Expected one round record behind its tasks, got {len(totals)}")
        total = totals[0]
        _check_round(total, tasks, rounds, clock)
        rounds, clock = rounds + 1, total.seconds
    return rounds


def _check_round(total: RoundRecord, tasks: list[TaskRecord], number: int, clock: float) -> None:
    where = f"round {total.round}"
    if total.round != number:
        raise ValueError(f"Expected round {number}, got {total.round}")
    if total.seconds < clock:
        raise ValueError(f"{where}: the clock went back from {clock} to {total.seconds}")
    if len({task.device for task in tasks}) != len(tasks):
        raise ValueError(f"{where}: expected one end for each device, got two for one")
    for task in tasks:
        _check_task(f"{where}, device {task.device}", task)
    wanted = summed(total.round, total.seconds, tasks)
    for name in ("tasks", "merged", "macs", "useful", "available", "down", "up", "joules"):
        left, right = getattr(total, name), getattr(wanted, name)
        if not isclose(left, right, rel_tol=1e-12):
            raise ValueError(f"{where}: {name} is {left}, its tasks sum to {right}")


def _check_task(where: str, task: TaskRecord) -> None:
    slack = 1e-9 * max(1.0, task.available)
    if task.useful > task.macs + slack:
        raise ValueError(f"{where}: got {task.useful} MACs of use out of {task.macs} spent")
    if task.macs > task.available + slack:
        raise ValueError(f"{where}: spent {task.macs} MACs where there were {task.available}")
    is_merged = task.end in MERGED
    if is_merged != (task.steps > 0):
        raise ValueError(f"{where}: ended {task.end} with {task.steps} steps")
    if not is_merged and task.useful:
        raise ValueError(f"{where}: ended {task.end} with {task.useful} useful MACs")
