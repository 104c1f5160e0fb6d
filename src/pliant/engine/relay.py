"""The relay: hands jobs to workers that may die, and puts the results in order."""

import reprlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from pliant.engine.workers import AnyWorkers, WorkerLost
from pliant.params import Params

ATTEMPTS = 3

H = TypeVar("H")  # how a crew knows one of its workers


class Answer(NamedTuple):
    """What a worker says: it is ready, a result, an exception with its traceback, or its death."""

    kind: Literal["ready", "done", "failed", "lost"]
    value: Any


class Crew(Protocol[H]):
    """Workers of one kind; the relay decides what each of them does."""

    def hire(self) -> H:
        """Begin to start a worker."""

    def share(self, shared: Params) -> None:
        """Make parameters known to the workers, for the jobs from now on."""

    def hand(self, worker: H, job: object) -> None:
        """Give an idle worker a job; if it is dead, it is heard so later."""

    def hear(self, workers: Collection[H]) -> Iterator[tuple[H, Answer]]:
        """Wait until at least one worker has something to say, and take it from one at a time.

        What is not taken is still there for the next call.
        """

    def dismiss(self, workers: Collection[H]) -> None:
        """End workers, whatever they are doing."""

    def close(self) -> None:
        """Give back what the crew holds."""


class Relay(Generic[H]):
    """A pool of `count` workers of a crew."""

    def __init__(self, kind: AnyWorkers, count: int, crew: Crew[H]) -> None:
        self.kind = kind
        self.count = count
        self._crew = crew
        self._starting: set[H] = set()
        self._idle: list[H] = []
        self._busy: dict[H, int] = {}  # the number of the job
        self._lost_starts: list[str] = []  # in a row
        try:
            self._hire()
        except BaseException:
            self.close()
            raise

    def run(
        self,
        jobs: Sequence[Any],
        shared: Params,
        *,
        cost: Callable[[Any], float] | None = None,
        tell: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        order: Iterable[int] = range(len(jobs))
        if cost is not None:
            order = sorted(order, key=lambda number: -cost(jobs[number]))
        waiting = deque(order)
        results: dict[int, Any] = {}
        deaths = [0] * len(jobs)
        self._lost_starts.clear()
        if jobs:
            self._crew.share(shared)
        try:
            while len(results) < len(jobs):
                self._hire()
                while waiting and self._idle:
                    worker = self._idle.pop()
                    self._busy[worker] = waiting.popleft()
                    self._crew.hand(worker, jobs[self._busy[worker]])
                for worker, answer in self._crew.hear([*self._starting, *self._idle, *self._busy]):
                    number = self._moved(worker, answer)
                    if number is None:
                        continue
                    if answer.kind == "done":
                        results[number] = answer.value
                        if tell is not None:
                            tell(jobs[number])
                    elif answer.kind == "failed":
                        raise _annotated(answer, _named(number, jobs))
                    else:
                        deaths[number] += 1
                        waiting.appendleft(number)
                        if deaths[number] == ATTEMPTS:
                            raise WorkerLost(
                                f"{_named(number, jobs)}, ended its worker {ATTEMPTS} times in a"
                                f" row, at last by {answer.value}"
                            )
        except BaseException:
            # what is still under way is nobody's any more, and must not meet the next parameters
            busy = list(self._busy)
            self._busy.clear()
            self._crew.dismiss(busy)
            raise
        return [results[number] for number in range(len(jobs))]

    def close(self) -> None:
        try:
            self._crew.dismiss([*self._starting, *self._idle, *self._busy])
        finally:
            self._crew.close()

    def _hire(self) -> None:
        """Begin to replace who is missing; if none can start, the rest go on, or it is an error."""
        missing = self.count - len(self._starting) - len(self._idle) - len(self._busy)
        if len(self._lost_starts) < ATTEMPTS:
            for _ in range(missing):
                self._starting.add(self._crew.hire())
        elif missing == self.count:
            raise WorkerLost(
                f"{len(self._lost_starts)} workers in a row ended while starting, at last by"
                f" {self._lost_starts[-1]}"
            )

    def _moved(self, worker: H, answer: Answer) -> int | None:
        """Note what a worker does now; return the number of the job it is done with."""
        if worker in self._starting:
            self._starting.remove(worker)
            if answer.kind == "ready":
                self._lost_starts.clear()
                self._idle.append(worker)
                return None
            self._crew.dismiss([worker])
            if answer.kind == "failed":
                raise _annotated(answer, "the start of a worker")
            self._lost_starts.append(answer.value)
            return None
        number = self._busy.pop(worker, None)
        if answer.kind == "lost":
            if number is None:
                self._idle.remove(worker)
            self._crew.dismiss([worker])
        else:
            self._idle.append(worker)
        return number


def _annotated(answer: Answer, what: str) -> Exception:
    error, text = answer.value
    assert isinstance(error, Exception)
    error.add_note(f"in {what}, in a worker:\n{text}")
    return error


def _named(number: int, jobs: Sequence[object]) -> str:
    short = reprlib.Repr()
    short.maxother = 120
    return f"job {number} of {len(jobs)}, {short.repr(jobs[number])}"
