import numpy as np
import pytest

from pliant.devices import FULL, Constant, Fleet, PerBatch, PerRound, Rows
from pliant.engine.rules import End, Rules, departures, judge
from pliant.engine.schedule import timetable
from pliant.engine.tasks import tasks

FAR = np.inf


def verdict(rules, arrival, *, done=None, leaves=None, wanted=None):
    count = len(arrival)
    return judge(
        rules,
        np.array(arrival),
        np.array(done or [4] * count),
        np.array(leaves or [FAR] * count),
        wanted=wanted or count,
        length=1.0,
        deadline=1.0 + rules.grace,
    )


def names(one):
    return [End(end).name for end in one.ends]


def test_late_is_lost_or_sent():
    arrival, done = [0.5, FAR, FAR], [4, 2, 0]
    lost = verdict(Rules(), arrival, done=done)
    assert names(lost) == ["FINISHED", "LATE", "LATE"]
    sent = verdict(Rules(late="partial"), arrival, done=done)
    assert names(sent) == ["FINISHED", "PARTIAL", "LATE"]
    assert sent.arrival.tolist() == [0.5, 1.0, FAR]


def test_a_round_lasts_its_length_unless_it_closes_early():
    assert verdict(Rules(), [0.5, 0.7]).close == 1.0
    assert verdict(Rules(early=True), [0.5, 0.7]).close == 0.7
    assert verdict(Rules(early=True), [0.5, FAR]).close == 1.0
    assert verdict(Rules(grace=0.1), [0.5, 1.05]).close == 1.05


def test_the_first_ones_in_count_and_the_rest_are_surplus():
    over = verdict(Rules(over=0.5), [0.9, 0.5, FAR, 0.7], wanted=2)
    assert names(over) == ["SURPLUS", "FINISHED", "LATE", "FINISHED"]
    early = verdict(Rules(over=0.5, early=True), [0.9, 0.5, FAR, 0.7], wanted=2)
    assert names(early) == ["SURPLUS", "FINISHED", "SURPLUS", "FINISHED"]
    assert early.close == 0.7


def test_too_few_make_a_round_void():
    few = verdict(Rules(quorum=0.75), [0.5, 0.6, FAR, FAR])
    assert names(few) == ["VOID", "VOID", "LATE", "LATE"]
    enough = verdict(Rules(quorum=0.75), [0.5, 0.6, 0.7, FAR])
    assert names(enough) == ["FINISHED", "FINISHED", "FINISHED", "LATE"]


def test_who_leaves_before_its_update_is_in_is_lost():
    leaves = [0.6, 0.4, 0.9]
    gone = verdict(Rules(late="partial"), [0.5, 0.5, FAR], leaves=leaves)
    assert names(gone) == ["FINISHED", "DROPPED", "DROPPED"]
    waiting = verdict(Rules(late="wait"), [0.5, 0.5, FAR], leaves=leaves)
    assert waiting.close == 0.9


def test_departures_have_their_probability_and_an_even_time():
    devices, rules = np.arange(20_000), Rules(dropout=0.2)
    leaves = departures(rules, devices, seed=0, round=3, length=2.0)
    gone = np.isfinite(leaves)
    assert gone.mean() == pytest.approx(0.2, abs=0.01)
    assert leaves[gone].mean() == pytest.approx(1.0, abs=0.03)
    assert leaves[gone].max() < 2.0
    other = departures(rules, devices, seed=0, round=4, length=2.0)
    assert np.isfinite(other)[gone].mean() == pytest.approx(0.2, abs=0.02)
    assert np.array_equal(leaves[:7], departures(rules, devices[:7], seed=0, round=3, length=2.0))


def test_a_dropped_device_works_until_it_leaves():
    fleet, work = Fleet(size=100, speed=Constant(0.5)), tasks(np.arange(100), 4, 10.0)
    rules = Rules(late="partial", dropout=0.5)
    table = timetable(fleet, PerRound(Rows((0.5,))), work, rules, round=1)
    leaves = departures(rules, work.devices, seed=0, round=1, length=1.0)
    gone = table.ends == End.DROPPED
    assert 30 < gone.sum() < 70
    assert table.busy[gone] == pytest.approx(leaves[gone])
    assert table.spent[gone] == pytest.approx(20 * leaves[gone])
    assert (table.useful[gone] == 0).all()
    assert (table.useful[~gone] == 20).all()


def test_grace_saves_those_who_are_a_little_late():
    fleet, work = Fleet(size=1, speed=Constant(0.99)), tasks(np.array([0]), 4, 10.0)
    assert timetable(fleet, FULL, work).ends.tolist() == [End.LATE]
    saved = timetable(fleet, FULL, work, Rules(grace=0.03))
    assert saved.ends.tolist() == [End.FINISHED]
    assert saved.close == pytest.approx(1 / 0.99)


def test_devices_do_not_plan_with_the_grace():
    fleet, work = Fleet(size=1, speed=Constant(0.5)), tasks(np.array([0]), 4, 10.0)
    plan = PerBatch(Rows((0.25, 0.5, 0.51, 1.0)), "paced")
    assert timetable(fleet, plan, work, Rules(grace=0.5)).row.tolist() == [[1, 1, 1, 1]]


def test_surplus_devices_stop_when_the_round_closes_early():
    classes = Fleet(size=100, speed=Constant(0.25, 1.0))
    work, plan = tasks(np.arange(13), 4, 10.0), PerRound(Rows((0.25,)))
    table = timetable(classes, plan, work, Rules(over=0.3, early=True), wanted=10)
    surplus = table.ends == End.SURPLUS
    assert surplus.sum() == 3
    assert table.busy[surplus] == pytest.approx(table.close)
    assert table.close == table.arrival[~surplus].max() < table.end[surplus].max()


def test_a_server_that_waits_gives_up_in_the_end():
    fleet, work = Fleet(size=1, speed=Constant(0.0)), tasks(np.array([0]), 1, 10.0)
    table = timetable(fleet, FULL, work, Rules(late="wait"))
    assert table.ends.tolist() == [End.LATE]
    assert np.isfinite(table.close)


def test_over_selection_rounds_up():
    assert [Rules(over=0.3).selected(wanted) for wanted in (1, 10, 100)] == [2, 13, 130]
    assert Rules().selected(10) == 10
    with pytest.raises(ValueError, match=r"at `\$.dropout` of Rules"):
        Rules(dropout=1.5)
    with pytest.raises(ValueError, match=r"at `\$.late` of Rules"):
        Rules(late="never")
