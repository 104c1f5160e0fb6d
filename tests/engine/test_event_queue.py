import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.engine.event_queue import Event, EventKind, EventQueue
from pliant.engine.round_rules import RoundRules, TaskOutcome, close_round

TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5])  # few, so that many events coincide
EVENTS = st.builds(Event, TIMES, st.sampled_from(EventKind), st.integers(-1, 3), st.integers(0, 2))


def pop_all(queue):
    return [queue.pop() for _ in range(len(queue))]


@given(st.lists(EVENTS), st.randoms())
def test_the_order_of_pushes_does_not_matter(events, random):
    queue = EventQueue()
    for event in random.sample(events, len(events)):
        queue.push(event)
    assert pop_all(queue) == sorted(events) == pop_all(EventQueue(events))


def test_updates_that_arrive_at_the_deadline_count_and_idle_devices_get_tasks_last():
    kinds = [EventKind.DISPATCH, EventKind.DEADLINE, EventKind.ARRIVAL, EventKind.DEPARTURE]
    queue = EventQueue([Event(1.0, kind) for kind in kinds])
    assert [event.kind for event in pop_all(queue)] == kinds[::-1]


def test_the_past_cannot_be_changed():
    queue = EventQueue([Event(1.0, EventKind.DEADLINE)])
    queue.pop()
    queue.push(Event(1.0, EventKind.ARRIVAL, 7))
    with pytest.raises(ValueError, match=r"Expected an event at 1\.0 s or later"):
        queue.push(Event(0.5, EventKind.ARRIVAL, 7))


def close_by_sorting(rules, arrival, steps_done, dropout_times, target, length, deadline):
    """Close a round without events: the rules on sorted arrival times."""
    has_left = dropout_times < np.minimum(arrival, deadline)
    is_partial = (rules.late == "partial") & (steps_done > 0) & np.isinf(arrival)
    in_time = (np.isfinite(arrival) | is_partial) & ~has_left
    outcomes = np.where(is_partial, TaskOutcome.PARTIAL, TaskOutcome.FINISHED)
    outcomes = np.where(in_time, outcomes, TaskOutcome.LATE)
    outcomes[has_left] = TaskOutcome.DROPPED
    arrival = np.where(in_time, np.minimum(arrival, deadline), np.inf)
    order = np.argsort(arrival, kind="stable")[: in_time.sum()]
    merged, surplus = order[:target], order[target:]
    outcomes[surplus] = TaskOutcome.SURPLUS
    if len(merged) < rules.quorum_size(target):
        outcomes[merged] = TaskOutcome.VOID
    last = arrival[merged].max(initial=0.0)
    closed_at = deadline
    is_complete = 0 < len(merged) == min(target, len(arrival))
    if is_complete:
        closed_at = last if rules.closes_at_target else max(length, last)
    elif not len(arrival):
        closed_at = length
    elif rules.late == "wait" and not (outcomes == TaskOutcome.LATE).any():
        closed_at = max(last, dropout_times[has_left].max(initial=0.0))
    if is_complete and closed_at < deadline:
        is_open = dropout_times > closed_at
        is_open[merged] = False
        outcomes[is_open] = TaskOutcome.SURPLUS
    return outcomes.tolist(), arrival.tolist(), closed_at


TASKS = st.lists(
    st.tuples(
        st.sampled_from([0.2, 0.5, 1.0, 1.05, 1.1, np.inf]),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0, np.inf, np.inf, np.inf]),
    ),
    max_size=5,
)
RULES = st.builds(
    RoundRules,
    late=st.sampled_from(["discard", "partial", "wait"]),
    grace=st.sampled_from([0.0, 0.1]),
    quorum=st.sampled_from([0.0, 0.5]),
    close_early=st.booleans(),
)


@given(RULES, TASKS, st.integers(1, 6))
def test_events_close_a_round_as_sorted_arrival_times_do(rules, tasks, target):
    arrival, steps_done, dropout_times = np.array(tasks, float).reshape(-1, 3).T
    deadline = 1.0 + rules.grace
    closure = close_round(
        rules,
        arrival,
        steps_done,
        dropout_times,
        target_updates=target,
        round_seconds=1.0,
        deadline=deadline,
    )
    expected = close_by_sorting(rules, arrival, steps_done, dropout_times, target, 1.0, deadline)
    assert (closure.outcomes.tolist(), closure.arrival.tolist(), closure.closed_at) == expected
