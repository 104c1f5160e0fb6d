"""A queue of events in virtual time."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

E = TypeVar("E")


class EventQueue(Generic[E]):
    """Events in the order of their times, ties in the order they were added.

    >>> from pliant.engine.event_queue import EventQueue
    >>> queue = EventQueue[str]()
    >>> queue.add(2.0, "close"); queue.add(0.5, "arrival"); queue.add(2.0, "open")
    >>> list(queue)
    [(0.5, 'arrival'), (2.0, 'close'), (2.0, 'open')]
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, E]] = []
        self._sequence = 0
        self.now = 0.0

    def add(self, time: float, event: E) -> None:
        """Add an event at or after the current time."""
        if not time >= self.now:
            raise ValueError(f"Expected a time of at least {self.now}, got {time}")
        heapq.heappush(self._heap, (time, self._sequence, event))
        self._sequence += 1

    def __iter__(self) -> Iterator[tuple[float, E]]:
        """Pop events in order; more may be added meanwhile."""
        while self._heap:
            self.now, _, event = heapq.heappop(self._heap)
            yield self.now, event
