import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.engine.agenda import Agenda


@given(st.lists(st.integers(0, 5)))
def test_events_come_by_time_and_then_as_they_were_entered(times):
    agenda = Agenda[int]()
    for place, time in enumerate(times):
        agenda.add(float(time), place)
    assert list(agenda) == sorted((float(time), place) for place, time in enumerate(times))


def test_an_event_may_enter_the_next_one():
    agenda, seen = Agenda[str](), []
    agenda.add(1.0, "open")
    for now, event in agenda:
        seen.append((now, event))
        if event == "open" and now < 3:
            agenda.add(now + 1, "open")
            agenda.add(now + 0.5, "arrival")
    assert seen == [(1, "open"), (1.5, "arrival"), (2, "open"), (2.5, "arrival"), (3, "open")]


def test_the_past_is_closed():
    agenda = Agenda[str]()
    agenda.add(2.0, "first")
    next(iter(agenda))
    assert agenda.now == 2.0
    agenda.add(2.0, "now")
    for time in (1.9, float("nan")):
        with pytest.raises(ValueError, match=r"Expected a time from 2.0 on, got"):
            agenda.add(time, "late")
