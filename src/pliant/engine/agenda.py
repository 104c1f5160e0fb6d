"""Virtual time as a queue of events: what happens next, ties in the order they were entered."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

E = TypeVar("E")


class Agenda(Generic[E]):
    """Events by their time.

    >>> from pliant.engine.agenda import Agenda
    >>> agenda = Agenda[str]()
    >>> agenda.add(2.0, "close"); agenda.add(0.5, "arrival"); agenda.add(2.0, "open")
    >>> list(agenda)
    [(0.5, 'arrival'), (2.0, 'close'), (2.0, 'open')]
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, E]] = []
        self._entered = 0
        self.now = 0.0

    def add(self, time: float, event: E) -> None:
        """Enter an event; nothing can be entered in the past."""
        if not time >= self.now:
            raise ValueError(f"Expected a time from {self.now} on, got {time}")
        heapq.heappush(self._heap, (time, self._entered, event))
        self._entered += 1

    def __iter__(self) -> Iterator[tuple[float, E]]:
        """Take events out in the order of time; new ones may be entered meanwhile."""
        while self._heap:
            self.now, _, event = heapq.heappop(self._heap)
            yield self.now, event
