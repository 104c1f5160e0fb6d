import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.devices import (
    FULL,
    Changing,
    Constant,
    DeviceClass,
    Fleet,
    Given,
    PerBatch,
    PerRound,
    Product,
    Rows,
    Steps,
    Windows,
)
from pliant.engine.rules import End, Rules
from pliant.engine.schedule import opening, timetable
from pliant.engine.tasks import Tasks, tasks

ROWS = Rows(tuple(np.linspace(0.25, 1.0, 16).tolist()))
PLANS = [FULL, PerRound(ROWS), PerRound(ROWS, margin=0.7), PerBatch(ROWS), PerBatch(ROWS, "paced")]
DEVICES = np.arange(12)

few = settings(max_examples=25)
rates = st.sampled_from([0.0, 0.5, 2.0, 8.0])
plans = st.sampled_from(PLANS)
rules = st.builds(
    Rules,
    late=st.sampled_from(["discard", "partial", "wait"]),
    grace=st.sampled_from([0.0, 0.03]),
    quorum=st.sampled_from([0.0, 0.8]),
    dropout=st.sampled_from([0.0, 0.3]),
    early=st.booleans(),
)


def changing(per_round, round_seconds=1.0):
    speed = Changing(low=0.25, high=1.0, per_round=per_round)
    return Fleet(size=100, speed=speed, round_seconds=round_seconds)


def noisy(devices, step, choice):
    return choice.macs * (1 + 0.2 * np.sin(devices + 7 * step))


def test_a_change_in_the_middle_of_a_mini_batch_counts_from_its_instant():
    # full speed is 20 MAC/s; in the middle of the first mini-batch it falls to a quarter
    fleet = Fleet(size=1, speed=Steps(times=(0.0, 0.25), speeds=(1.0, 0.25)))
    table = timetable(fleet, FULL, tasks(np.array([0]), 2, 10.0), Rules(late="wait"))
    assert table.start.tolist() == [[0.0, 1.25]]
    assert table.end.tolist() == [[1.25, 3.25]]
    assert table.close == 3.25


def test_discard_loses_and_partial_sends_what_is_done():
    fleet = Fleet(size=1, speed=Constant(0.75))
    work = tasks(np.array([0]), 4, 10.0)  # 30 of 40 MACs by the deadline
    lost, sent = (timetable(fleet, FULL, work, Rules(late=late)) for late in ("discard", "partial"))
    assert lost.ends.tolist() == [End.LATE]
    assert (lost.used.tolist(), lost.useful.tolist()) == ([0], [0.0])
    assert sent.ends.tolist() == [End.PARTIAL]
    assert (sent.used.tolist(), sent.useful.tolist()) == ([3], [30.0])
    for table in (lost, sent):
        assert table.spent == pytest.approx([30.0])
        assert table.available == pytest.approx([30.0])
        assert table.close == 1.0


def test_the_device_chooses_anew_before_every_mini_batch():
    fleet = Fleet(size=1, speed=Steps(times=(0.0, 0.5), speeds=(1.0, 0.5)))
    table = timetable(fleet, PerBatch(Rows((0.25, 0.5, 1.0))), tasks(np.array([0]), 4, 10.0))
    assert table.row.tolist() == [[2, 2, 1, 1]]
    assert table.end.tolist() == [[0.25, 0.5, 0.75, 1.0]]
    held = timetable(fleet, PerRound(Rows((0.25, 0.5, 1.0))), tasks(np.array([0]), 4, 10.0))
    assert held.row.tolist() == [[2, 2, 2, 2]]
    assert held.ends.tolist() == [End.LATE]


def test_unequal_mini_batches_share_the_round_by_their_size():
    fleet = Fleet(size=1, speed=Constant(1.0))
    none = np.zeros(1)
    work = Tasks(np.array([0]), np.array([[16.0, 16.0, 4.0]]), none, none)
    for plan in (FULL, PerRound(ROWS), PerBatch(ROWS), PerBatch(ROWS, "paced")):
        table = timetable(fleet, plan, work)
        assert table.macs.tolist() == work.full.tolist()
        assert table.ends.tolist() == [End.FINISHED]


def test_download_and_upload_take_their_time():
    link = DeviceClass(up=10.0, down=40.0, latency=0.05)
    fleet = Fleet(size=1, speed=Constant(1.0), classes=(link,), macs_per_second=20.0)
    work = tasks(np.array([0]), 2, 5.0, down=2.0, up=3.0)
    table = timetable(fleet, FULL, work)
    assert table.start[0] == pytest.approx([0.1, 0.35])
    assert table.arrival == pytest.approx([0.95])  # 0.1 down, 0.5 training, 0.35 up
    # half the speed: training would end at 1.1, and what is sent must leave by 0.65
    slow = Fleet(size=1, speed=Constant(0.5), classes=(link,), macs_per_second=20.0)
    partial = timetable(slow, FULL, work, Rules(late="partial"))
    assert partial.used.tolist() == [1]
    assert partial.spent == pytest.approx([5.5])
    chosen = timetable(slow, PerBatch(Rows((0.25, 0.5, 1.0)), "paced"), work)
    assert chosen.row.tolist() == [[1, 1]]  # 10 MAC/s for 0.55 s, for two
    assert chosen.ends.tolist() == [End.FINISHED]


def test_the_server_chooses_before_the_download_and_the_device_after():
    link = DeviceClass(down=10.0)
    falls = Steps(times=(0.0, 0.1), speeds=(1.0, 0.5))
    fleet = Fleet(size=1, speed=falls, classes=(link,), macs_per_second=25.0)
    work, rows = tasks(np.array([0]), 2, 10.0, down=2.0), Rows((0.25, 0.5, 1.0))
    assert timetable(fleet, PerRound(rows), work).row.tolist() == [[2, 2]]
    assert timetable(fleet, PerBatch(rows, "paced"), work).row.tolist() == [[1, 1]]


def test_a_pause_stops_the_clock_of_the_work_only():
    charging = Windows(windows=((0.0, 0.25), (0.5, 1.0)), period=1.0)
    fleet = Fleet(size=1, speed=Product((Constant(1.0), charging)))
    table = timetable(fleet, FULL, tasks(np.array([0]), 2, 10.0), Rules(late="partial"))
    assert table.end[0, 0] == 0.75
    assert table.spent == pytest.approx([15.0])


@few
@given(per_round=rates, plan=plans, rule=rules, start=st.sampled_from([0.0, 17.25, 4000.0]))
def test_timetables_conserve_work(per_round, plan, rule, start):
    fleet = changing(per_round, round_seconds=2.0)
    work = tasks(DEVICES, 1 + DEVICES % 5, 1e6)
    table = timetable(fleet, plan, work, rule, start=start, realised=noisy)
    path = fleet.path(DEVICES, start, 3 * table.close).scaled(work.full.sum(axis=1) / 2.0)
    for step in range(5):
        ended = np.isfinite(table.end[:, step])
        begin, end = (np.where(ended, times[:, step], 0.0) for times in (table.start, table.end))
        done = path.work(end) - path.work(begin)
        assert done[ended] == pytest.approx(table.macs[ended, step], rel=1e-9)
    assert table.spent == pytest.approx(path.work(table.busy), rel=1e-9)
    assert (table.useful <= table.spent * (1 + 1e-12)).all()
    assert (table.spent <= table.available * (1 + 1e-8)).all()


@few
@given(per_round=rates, plan=plans, rule=rules, seed=st.integers(0, 20))
def test_every_task_has_one_end_that_fits_its_steps(per_round, plan, rule, seed):
    work = tasks(DEVICES, 1 + DEVICES % 5, 1e6)
    table = timetable(changing(per_round), plan, work, rule, seed=seed, wanted=9, realised=noisy)
    steps = np.count_nonzero(work.full, axis=1)
    counts = np.isin(table.ends, [End.FINISHED, End.PARTIAL])
    assert counts.sum() <= 9
    assert (table.used[table.ends == End.FINISHED] == steps[table.ends == End.FINISHED]).all()
    assert (table.used[table.ends == End.PARTIAL] >= 1).all()
    assert (table.used[table.ends == End.PARTIAL] < steps[table.ends == End.PARTIAL]).all()
    assert (table.used[~counts] == 0).all()
    assert (table.arrival[counts] <= table.close).all()
    assert (table.row[np.isinf(table.start)] == -1).all()
    assert (table.start[:, 1:] >= table.end[:, :-1])[np.isfinite(table.start[:, 1:])].all()


@few
@given(per_round=rates, plan=plans, dropout=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 20))
def test_partial_never_does_less_than_discard(per_round, plan, dropout, seed):
    work = tasks(DEVICES, 6, 1e6)
    discard, partial = (
        timetable(
            changing(per_round),
            plan,
            work,
            Rules(late=late, dropout=dropout),
            seed=seed,
            realised=noisy,
        )
        for late in ("discard", "partial")
    )
    assert (partial.useful >= discard.useful).all()
    assert np.array_equal(partial.end, discard.end)


@few
@given(per_round=rates, row=st.sampled_from([(0.25,), (0.6,), (1.0,)]), more=st.floats(1.0, 3.0))
def test_more_resource_never_finishes_a_fixed_plan_later(per_round, row, more):
    base = Changing(low=0.25, high=1.0, per_round=per_round)
    slow = Fleet(size=100, speed=Product((base, Constant(1.0))))
    fast = Fleet(size=100, speed=Product((base, Constant(more))))
    work, wait = tasks(DEVICES, 5, 1e6), Rules(late="wait")
    first, second = (timetable(fleet, PerRound(Rows(row)), work, wait) for fleet in (slow, fast))
    assert (second.end <= first.end * (1 + 1e-12)).all()
    assert second.close <= first.close * (1 + 1e-12)


@few
@given(plan=plans, rule=rules, seed=st.integers(0, 20))
def test_no_changes_are_constant_speed(plan, rule, seed):
    work = tasks(DEVICES, 6, 1e6)
    constant = Fleet(size=100, speed=Constant(0.25, 1.0))
    a = timetable(changing(0.0), plan, work, rule, seed=seed, start=3.0, realised=noisy)
    b = timetable(constant, plan, work, rule, seed=seed, start=3.0, realised=noisy)
    assert np.array_equal(a.end, b.end)
    assert np.array_equal(a.ends, b.ends)
    assert np.array_equal(a.spent, b.spent)


@few
@given(per_round=rates, plan=plans, place=st.integers(0, 11), start=st.floats(0, 1e4))
def test_a_device_has_the_same_timetable_in_any_company(per_round, plan, place, start):
    fleet = changing(per_round)
    everyone = timetable(fleet, plan, tasks(DEVICES, 1 + DEVICES % 5, 1e6), start=start)
    one = DEVICES[place : place + 1]
    alone = timetable(fleet, plan, tasks(one, 1 + one % 5, 1e6), start=start)
    width = alone.end.shape[1]
    assert np.array_equal(alone.end[0], everyone.end[place, :width])
    assert np.array_equal(alone.row[0], everyone.row[place, :width])
    assert alone.spent[0] == everyone.spent[place]
    assert alone.ends[0] == everyone.ends[place]


@few
@given(per_round=rates, start=st.floats(0, 1e4), seed=st.integers(0, 20))
def test_all_methods_see_the_same_traces(per_round, start, seed):
    work = tasks(DEVICES, 6, 1e6)
    tables = [timetable(changing(per_round), plan, work, seed=seed, start=start) for plan in PLANS]
    for table in tables[1:]:
        assert np.array_equal(table.available, tables[0].available)


@few
@given(batches=st.integers(1, 60), full=st.floats(1.0, 1e10), length=st.floats(0.01, 1e5))
def test_full_resources_always_finish_with_the_full_network(batches, full, length):
    fleet = Fleet(size=3, speed=Constant(1.0), round_seconds=length)
    for plan in (FULL, PerRound(ROWS), PerBatch(ROWS), PerBatch(ROWS, "paced")):
        table = timetable(fleet, plan, tasks(np.arange(3), batches, full))
        assert (table.ends == End.FINISHED).all()
        assert (table.macs == full).all()


def reference(device, steps, full, margin=1.0, choose=None):
    """Run one device's mini-batches one by one with plain arithmetic; return the ends by step."""
    now, ends, row = 0.0, [], None
    for step in range(steps):
        speed = device.speed(now) * steps * full
        if choose == "round":
            budget = margin * device.speed(0.0) * full
        elif choose == "as-written":
            budget = speed / steps
        else:
            budget = speed * (1.0 - now) / (steps - step)
        fitting = [share for share in ROWS.shares if share * full <= budget * (1 + 1e-9)]
        row = max(fitting, default=ROWS.shares[0])
        now = device.finish(now, row / steps)
        ends.append(now)
    return [end for end in ends if end <= 1.0 + 1e-9]


@pytest.mark.parametrize("per_round", [0.0, 1.0, 6.0])
@pytest.mark.parametrize(
    ("plan", "choose"),
    [(PerRound(ROWS), "round"), (PerBatch(ROWS), "as-written"), (PerBatch(ROWS, "paced"), "paced")],
)
def test_the_timetable_agrees_with_one_device_after_another(per_round, plan, choose):
    fleet = changing(per_round)
    table = timetable(fleet, plan, tasks(DEVICES, 5, 1e6))
    for place, index in enumerate(DEVICES):
        ends = reference(fleet.device(int(index)), 5, 1e6, choose=choose)
        assert np.isfinite(table.end[place]).sum() == len(ends)
        assert table.end[place, : len(ends)] == pytest.approx(ends, rel=1e-9)


def test_what_the_opening_gives_is_what_a_held_plan_chooses():
    fleet, plan, work = changing(2.0), PerRound(ROWS), tasks(DEVICES, 5, 1e6)
    moment = opening(fleet, work, seed=4, start=8.0)
    given_plan = Given(moment, plan.choose(moment))
    a, b = (timetable(fleet, one, work, seed=4, start=8.0) for one in (plan, given_plan))
    assert np.array_equal(a.end, b.end)
    assert np.array_equal(a.row, b.row)


def test_expected_macs_are_those_planned_for_the_steps_that_count():
    fleet, work = Fleet(size=2, speed=Constant(1.0)), tasks(np.arange(2), 2, 10.0)
    table = timetable(fleet, FULL, work, Rules(grace=1.0), realised=lambda d, s, c: c.macs * 1.5)
    assert table.expected.tolist() == [20.0, 20.0]
    assert table.useful.tolist() == [30.0, 30.0]


def test_a_round_without_devices_is_empty():
    table = timetable(changing(1.0), PerBatch(ROWS), tasks(DEVICES[:0], 5, 1e6))
    assert (len(table.ends), table.close) == (0, 1.0)


def test_tasks_without_work_are_refused():
    with pytest.raises(ValueError, match="at least one mini-batch a device"):
        timetable(changing(0.0), FULL, tasks(DEVICES, np.minimum(DEVICES, 3), 1.0))
