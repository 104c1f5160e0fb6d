"""The event queue: virtual time passes from one event to the next."""

import heapq
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class EventKind(IntEnum):
    """What happens; at one instant, events happen in this order."""

    DEPARTURE = 0  # a device leaves
    ARRIVAL = 1  # of an update
    ROUND_END = 2  # the length of a round has passed
    DEADLINE = 3  # no update counts any more
    DISPATCH = 4  # idle devices get tasks, once all arrivals of the instant are in


class Event(NamedTuple):
    """Something that happens at a time, to a device or, with -1, to the server.

    Events are ordered by their fields, so that their order is the same in every run.

    >>> from pliant.engine.event_queue import Event, EventKind
    >>> Event(2.0, EventKind.ARRIVAL, 7) < Event(2.0, EventKind.DEADLINE)
    True
    """

    time: float  # seconds, virtual
    kind: EventKind
    device: int = -1
    number: int = 0  # tells two events of a device apart, such as the number of its task


class EventQueue:
    """Events that have not happened yet, and the time of the last one that has.

    >>> from pliant.engine.event_queue import Event, EventKind, EventQueue
    >>> queue = EventQueue([Event(2.0, EventKind.DEADLINE), Event(1.5, EventKind.ARRIVAL, 7)])
    >>> queue.pop().device, queue.now, len(queue)
    (7, 1.5, 1)
    """

    def __init__(self, events: Iterable[Event] = (), now: float = 0.0) -> None:
        self._heap = list(events)
        self.now = now
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, event: Event) -> None:
        """Add an event; the past cannot be changed."""
        if not event.time >= self.now:
            raise ValueError(f"Expected an event at {self.now} s or later, got {event}")
        heapq.heappush(self._heap, event)

    def pop(self) -> Event:
        """Take the next event and move time to it."""
        event = heapq.heappop(self._heap)
        self.now = event.time
        return event
