import numpy as np
import pytest

from pliant.devices import FULL_NETWORK, ConstantTrace, CostRows, Fleet, PerBatch, PerRound
from pliant.engine.round_rules import (
    RoundRules,
    TaskOutcome,
    close_round,
    sample_dropout_times,
)
from pliant.engine.round_tasks import make_tasks
from pliant.engine.timetable import build_timetable

NEVER = np.inf


def make_strict_rules(**fields):
    return RoundRules(**{"grace": 0.0} | fields)


def close(rules, arrival, *, steps_done=None, dropout_times=None, target=None):
    count = len(arrival)
    return close_round(
        rules,
        np.array(arrival),
        np.array(steps_done or [4] * count),
        np.array(dropout_times or [NEVER] * count),
        target_updates=target or count,
        round_seconds=1.0,
        deadline=1.0 + rules.grace,
    )


def names(closure):
    return [TaskOutcome(outcome).name for outcome in closure.outcomes]


def run_device(speed, policy=FULL_NETWORK, **rules):
    """Build the timetable of one device with four mini-batches."""
    fleet, tasks = Fleet(size=1, speed=ConstantTrace(speed)), make_tasks(np.array([0]), 4, 10.0)
    return build_timetable(fleet, policy, tasks, make_strict_rules(**rules))


def test_late_work_is_lost_or_sent():
    arrival, steps_done = [0.5, NEVER, NEVER], [4, 2, 0]
    lost = close(make_strict_rules(), arrival, steps_done=steps_done)
    assert names(lost) == ["FINISHED", "LATE", "LATE"]
    sent = close(make_strict_rules(late="partial"), arrival, steps_done=steps_done)
    assert names(sent) == ["FINISHED", "PARTIAL", "LATE"]
    assert sent.arrival.tolist() == [0.5, 1.0, NEVER]


def test_a_round_lasts_its_length_unless_it_closes_early():
    assert close(make_strict_rules(), [0.5, 0.7]).closed_at == 1.0
    assert close(make_strict_rules(close_early=True), [0.5, 0.7]).closed_at == 0.7
    assert close(make_strict_rules(close_early=True), [0.5, NEVER]).closed_at == 1.0
    assert close(make_strict_rules(grace=0.1), [0.5, 1.05]).closed_at == 1.05


def test_the_server_waits_during_the_grace_only_for_devices_that_have_not_sent():
    rules = RoundRules(grace=0.1)
    assert close(rules, [0.5, NEVER]).closed_at == 1.1
    assert close(rules, [0.5, 0.7], target=3).closed_at == 1.0
    assert close(rules, [0.5, 1.05], target=3).closed_at == 1.05
    assert close(rules, [], target=3).closed_at == 1.0
    assert close(RoundRules(late="wait"), [], target=3).closed_at == 1.0  # else time would stop


def test_a_target_above_the_selected_devices_is_reached_when_all_have_answered():
    rules = RoundRules(close_early=True, grace=0.5)
    assert close(rules, [0.5, 0.7], target=10).closed_at == 0.7
    assert close(rules, [0.5, NEVER], target=10).closed_at == 1.5
    assert close(RoundRules(grace=0.5), [0.5, 0.7], target=10).closed_at == 1.0


@pytest.mark.parametrize("rules", [RoundRules(close_early=True), RoundRules(late="wait")])
def test_a_round_without_devices_lasts_until_the_deadline(rules):
    assert close(rules, [], target=10).closed_at == 1.0


def test_the_first_updates_count_and_the_rest_are_surplus():
    arrival, rules = [0.9, 0.5, NEVER, 0.7], make_strict_rules(over_selection=0.5, close_early=True)
    late = close(make_strict_rules(over_selection=0.5), arrival, target=2)
    assert names(late) == ["SURPLUS", "FINISHED", "LATE", "FINISHED"]
    early = close(rules, arrival, target=2)
    assert names(early) == ["SURPLUS", "FINISHED", "SURPLUS", "FINISHED"]
    assert early.closed_at == 0.7


def test_too_few_updates_make_a_round_void():
    few = close(make_strict_rules(quorum=0.75), [0.5, 0.6, NEVER, NEVER])
    assert names(few) == ["VOID", "VOID", "LATE", "LATE"]
    enough = close(make_strict_rules(quorum=0.75), [0.5, 0.6, 0.7, NEVER])
    assert names(enough) == ["FINISHED", "FINISHED", "FINISHED", "LATE"]


def test_a_device_that_leaves_before_its_update_arrives_is_dropped():
    dropout_times = [0.6, 0.4, 0.9]
    closed = close(
        make_strict_rules(late="partial"), [0.5, 0.5, NEVER], dropout_times=dropout_times
    )
    assert names(closed) == ["FINISHED", "DROPPED", "DROPPED"]
    waiting = close(make_strict_rules(late="wait"), [0.5, 0.5, NEVER], dropout_times=dropout_times)
    assert waiting.closed_at == 0.9


def test_dropouts_have_their_probability_and_uniform_times():
    everyone, rules = np.arange(20_000), RoundRules(dropout=0.2)
    dropout_times = sample_dropout_times(rules, everyone, seed=0, round=3, round_seconds=2.0)
    has_left = np.isfinite(dropout_times)
    assert has_left.mean() == pytest.approx(0.2, abs=0.01)
    assert dropout_times[has_left].mean() == pytest.approx(1.0, abs=0.03)
    assert dropout_times[has_left].max() < 2.0
    other = sample_dropout_times(rules, everyone, seed=0, round=4, round_seconds=2.0)
    assert np.isfinite(other)[has_left].mean() == pytest.approx(0.2, abs=0.02)
    few = sample_dropout_times(rules, everyone[:7], seed=0, round=3, round_seconds=2.0)
    assert np.array_equal(dropout_times[:7], few)


def test_a_dropped_device_works_until_it_leaves():
    fleet, tasks = Fleet(size=100, speed=ConstantTrace(0.5)), make_tasks(np.arange(100), 4, 10.0)
    rules = RoundRules(late="partial", dropout=0.5)
    table = build_timetable(fleet, PerRound(CostRows((0.5,))), tasks, rules, round=1)
    dropout_times = sample_dropout_times(rules, tasks.devices, seed=0, round=1, round_seconds=1.0)
    has_left = table.outcomes == TaskOutcome.DROPPED
    assert 30 < has_left.sum() < 70
    assert table.busy[has_left] == pytest.approx(dropout_times[has_left])
    assert table.spent[has_left] == pytest.approx(20 * dropout_times[has_left])
    assert (table.useful[has_left] == 0).all()
    assert (table.useful[~has_left] == 20).all()


def test_grace_accepts_updates_that_are_a_little_late():
    assert run_device(0.99).outcomes.tolist() == [TaskOutcome.LATE]
    saved = run_device(0.99, grace=0.03)
    assert saved.outcomes.tolist() == [TaskOutcome.FINISHED]
    assert saved.closed_at == pytest.approx(1 / 0.99)


def test_every_method_has_the_same_grace_by_default():
    assert RoundRules().grace == 0.03
    assert run_device(0.98, late="partial", grace=RoundRules().grace).closed_at > 1.0


def test_devices_plan_without_the_grace():
    policy = PerBatch(CostRows((0.25, 0.5, 0.51, 1.0)), "paced")
    assert run_device(0.5, policy, grace=0.5).row.tolist() == [[1, 1, 1, 1]]


def test_surplus_devices_stop_when_the_round_closes_early():
    classes = Fleet(size=100, speed=ConstantTrace(0.25, 1.0))
    tasks, policy = make_tasks(np.arange(13), 4, 10.0), PerRound(CostRows((0.25,)))
    table = build_timetable(
        classes, policy, tasks, RoundRules(over_selection=0.3, close_early=True), target_updates=10
    )
    surplus = table.outcomes == TaskOutcome.SURPLUS
    assert surplus.sum() == 3
    assert table.busy[surplus] == pytest.approx(table.closed_at)
    assert table.closed_at == table.arrival[~surplus].max() < table.end[surplus].max()


def test_a_waiting_server_gives_up_eventually():
    table = run_device(0.0, late="wait")
    assert table.outcomes.tolist() == [TaskOutcome.LATE]
    assert np.isfinite(table.closed_at)


def test_over_selection_rounds_up():
    rules = RoundRules(over_selection=0.3)
    assert [rules.selection_size(target) for target in (1, 10, 100)] == [2, 13, 130]
    assert RoundRules().selection_size(10) == 10
    with pytest.raises(ValueError, match=r"at `\$.dropout` of RoundRules"):
        RoundRules(dropout=1.5)
    with pytest.raises(ValueError, match=r"at `\$.late` of RoundRules"):
        RoundRules(late="never")


def test_by_default_a_device_may_be_three_per_cent_late():
    tasks = make_tasks(np.array([0]), 4, 10.0)
    for speed, outcome in ((1 / 1.029, TaskOutcome.FINISHED), (1 / 1.031, TaskOutcome.LATE)):
        fleet = Fleet(size=1, speed=ConstantTrace(speed))
        assert build_timetable(fleet, FULL_NETWORK, tasks).outcomes[0] == outcome
