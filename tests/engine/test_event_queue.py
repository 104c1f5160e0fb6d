import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.engine.event_queue import EventQueue


@given(st.lists(st.integers(0, 5)))
def test_events_come_by_time_and_then_in_the_order_they_were_added(times):
    queue = EventQueue[int]()
    for index, time in enumerate(times):
        queue.add(float(time), index)
    assert list(queue) == sorted((float(time), index) for index, time in enumerate(times))


def test_an_event_may_add_the_next_one():
    queue, seen = EventQueue[str](), []
    queue.add(1.0, "open")
    for now, event in queue:
        seen.append((now, event))
        if event == "open" and now < 3:
            queue.add(now + 1, "open")
            queue.add(now + 0.5, "arrival")
    assert seen == [(1, "open"), (1.5, "arrival"), (2, "open"), (2.5, "arrival"), (3, "open")]


def test_events_in_the_past_are_refused():
    queue = EventQueue[str]()
    queue.add(2.0, "first")
    next(iter(queue))
    assert queue.now == 2.0
    queue.add(2.0, "now")
    for time in (1.9, float("nan")):
        with pytest.raises(ValueError, match=r"Expected a time of at least 2.0, got"):
            queue.add(time, "late")
