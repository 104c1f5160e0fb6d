import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant import devices
from pliant.devices import FULL_NETWORK, ConstantTrace, CostRows, Fleet, PerBatch, PerRound
from pliant.engine.round_rules import RoundRules, TaskOutcome
from pliant.engine.round_tasks import RoundTasks, make_tasks
from pliant.engine.timetable import build_timetable, compute_start_status

ROWS = CostRows(tuple(np.linspace(0.25, 1.0, 16).tolist()))
THREE_ROWS = CostRows((0.25, 0.5, 1.0))
BASIC_POLICIES = [FULL_NETWORK, PerRound(ROWS), PerBatch(ROWS), PerBatch(ROWS, "paced")]
POLICIES = [*BASIC_POLICIES, PerRound(ROWS, margin=0.7)]
DEVICES = np.arange(12)
STRICT = RoundRules(grace=0.0)

few_examples = settings(max_examples=25)
rates = st.sampled_from([0.0, 0.5, 2.0, 8.0])
policies = st.sampled_from(POLICIES)
rules = st.builds(
    RoundRules,
    late=st.sampled_from(["discard", "partial", "wait"]),
    grace=st.sampled_from([0.0, 0.03]),
    quorum=st.sampled_from([0.0, 0.8]),
    dropout=st.sampled_from([0.0, 0.3]),
    close_early=st.booleans(),
    cost=st.sampled_from(["realised", "expected"]),
)


def make_fleet(per_round, round_seconds=1.0):
    speed = devices.ChangingTrace(low=0.25, high=1.0, per_round=per_round)
    return Fleet(size=100, speed=speed, round_seconds=round_seconds)


def run_device(speed, policy=FULL_NETWORK, late="discard", batches=4, changes="anytime"):
    """Build the timetable of one device, whose mini-batches take 10 MACs with the full network."""
    fleet, tasks = Fleet(size=1, speed=speed), make_tasks(np.array([0]), batches, 10.0)
    return build_timetable(fleet, policy, tasks, RoundRules(late=late, grace=0.0, changes=changes))


def noisy(active, step, choice):
    return choice.macs * (1 + 0.2 * np.sin(active + 7 * step))


def test_a_speed_change_within_a_mini_batch_counts_from_its_instant():
    # full speed is 20 MAC/s; in the middle of the first mini-batch it falls to a quarter
    slowing = devices.SteppedTrace(times=(0.0, 0.25), speeds=(1.0, 0.25))
    table = run_device(slowing, late="wait", batches=2)
    assert table.start.tolist() == [[0.0, 1.25]]
    assert table.end.tolist() == [[1.25, 3.25]]
    assert table.closed_at == 3.25


def test_a_speed_that_changes_between_mini_batches_holds_for_a_whole_one():
    # the first mini-batch keeps full speed although it falls to a quarter; the second has a quarter
    slowing = devices.SteppedTrace(times=(0.0, 0.25), speeds=(1.0, 0.25))
    table = run_device(slowing, late="wait", batches=2, changes="batch")
    assert table.start.tolist() == [[0.0, 0.5]]
    assert table.end.tolist() == [[0.5, 2.5]]
    # by the deadline the second has had 0.5 s at 5 MAC/s
    late = run_device(slowing, batches=2, changes="batch")
    assert (late.spent.tolist(), late.available.tolist()) == ([12.5], [12.5])


def test_a_mini_batch_that_starts_in_a_pause_waits_for_its_end_and_keeps_that_speed():
    paused = devices.SteppedTrace(times=(0.0, 0.25, 0.5), speeds=(0.0, 1.0, 0.1))
    table = run_device(paused, late="wait", batches=1, changes="batch")
    assert table.end.tolist() == [[1.25]]
    assert run_device(paused, batches=1, changes="batch").spent.tolist() == [7.5]
    never = run_device(ConstantTrace(0.0), batches=1, changes="batch")
    assert (never.outcomes.tolist(), never.spent.tolist()) == ([TaskOutcome.LATE], [0.0])


@pytest.mark.parametrize("policy", [PerBatch(ROWS), PerBatch(ROWS, "paced")])
@pytest.mark.parametrize("per_round", [0.0, 1.0, 4.0])
def test_if_speeds_change_between_mini_batches_and_costs_are_expected_adaptive_devices_finish(
    policy, per_round
):
    rules = RoundRules(grace=0.0, changes="batch", cost="expected")
    table = build_timetable(
        make_fleet(per_round), policy, make_tasks(DEVICES, 6, 1e6), rules, step_cost=noisy
    )
    is_short = table.is_short.any(axis=1)
    assert (table.outcomes[~is_short] == TaskOutcome.FINISHED).all()
    assert is_short.sum() < 3
    assert np.array_equal(table.macs, table.planned)


def test_discard_loses_and_partial_sends_finished_steps():
    speed = ConstantTrace(0.75)  # 30 of 40 MACs by the deadline
    lost, sent = (run_device(speed, late=late) for late in ("discard", "partial"))
    assert lost.outcomes.tolist() == [TaskOutcome.LATE]
    assert (lost.used_steps.tolist(), lost.useful.tolist()) == ([0], [0.0])
    assert sent.outcomes.tolist() == [TaskOutcome.PARTIAL]
    assert (sent.used_steps.tolist(), sent.useful.tolist()) == ([3], [30.0])
    for table in (lost, sent):
        assert table.spent == pytest.approx([30.0])
        assert table.available == pytest.approx([30.0])
        assert table.closed_at == 1.0


def test_a_device_chooses_before_every_mini_batch():
    slowing = devices.SteppedTrace(times=(0.0, 0.5), speeds=(1.0, 0.5))
    table = run_device(slowing, PerBatch(THREE_ROWS))
    assert table.row.tolist() == [[2, 2, 1, 1]]
    assert table.end.tolist() == [[0.25, 0.5, 0.75, 1.0]]
    per_round = run_device(slowing, PerRound(THREE_ROWS))
    assert per_round.row.tolist() == [[2, 2, 2, 2]]
    assert per_round.outcomes.tolist() == [TaskOutcome.LATE]


def test_unequal_mini_batches_share_the_round_by_their_size():
    tasks = RoundTasks(np.array([0]), np.array([[16.0, 16.0, 4.0]]), np.zeros(1), np.zeros(1))
    for policy in BASIC_POLICIES:
        table = build_timetable(Fleet(size=1, speed=ConstantTrace(1.0)), policy, tasks)
        assert table.macs.tolist() == tasks.full_macs.tolist()
        assert table.outcomes.tolist() == [TaskOutcome.FINISHED]


def test_download_and_upload_take_their_time():
    link = devices.DeviceClass(up=10.0, down=40.0, latency=0.05)
    fleet = Fleet(size=1, speed=ConstantTrace(1.0), classes=(link,), macs_per_second=20.0)
    tasks = make_tasks(np.array([0]), 2, 5.0, down_bytes=2.0, up_bytes=3.0)
    table = build_timetable(fleet, FULL_NETWORK, tasks)
    assert table.start[0] == pytest.approx([0.1, 0.35])
    assert table.arrival == pytest.approx([0.95])  # 0.1 down, 0.5 training, 0.35 up
    # half the speed: training would end at 1.1, and the upload must start by 0.65
    slow = Fleet(size=1, speed=ConstantTrace(0.5), classes=(link,), macs_per_second=20.0)
    partial = build_timetable(slow, FULL_NETWORK, tasks, RoundRules(late="partial", grace=0.0))
    assert partial.used_steps.tolist() == [1]
    assert partial.spent == pytest.approx([5.5])
    paced = build_timetable(slow, PerBatch(THREE_ROWS, "paced"), tasks)
    assert paced.row.tolist() == [[1, 1]]  # 10 MAC/s for 0.55 s, for two
    assert paced.outcomes.tolist() == [TaskOutcome.FINISHED]


def test_the_server_chooses_before_the_download_and_the_device_after():
    link = devices.DeviceClass(down=10.0)
    slowing = devices.SteppedTrace(times=(0.0, 0.1), speeds=(1.0, 0.5))
    fleet = Fleet(size=1, speed=slowing, classes=(link,), macs_per_second=25.0)
    tasks = make_tasks(np.array([0]), 2, 10.0, down_bytes=2.0)
    assert build_timetable(fleet, PerRound(THREE_ROWS), tasks).row.tolist() == [[2, 2]]
    assert build_timetable(fleet, PerBatch(THREE_ROWS, "paced"), tasks).row.tolist() == [[1, 1]]


def test_a_pause_stops_the_work_but_not_the_clock():
    charging = devices.OnOffWindows(windows=((0.0, 0.25), (0.5, 1.0)), period=1.0)
    speed = devices.ProductTrace((ConstantTrace(1.0), charging))
    table = run_device(speed, late="partial", batches=2)
    assert table.end[0, 0] == 0.75
    assert table.spent == pytest.approx([15.0])


@few_examples
@given(
    per_round=rates,
    policy=policies,
    rule=rules,
    changes=st.sampled_from(["anytime", "batch"]),
    link=st.sampled_from([None, 40.0, devices.ChangingTrace(low=0.0, high=90.0, per_round=3.0)]),
)
def test_planned_costs_and_a_function_that_returns_them_give_the_same_bits(
    per_round, policy, rule, changes, link
):
    rule = msgspec.structs.replace(rule, changes=changes, cost="realised")
    kind = devices.DeviceClass(up=link, down=link, latency=0.01)
    fleet = msgspec.structs.replace(make_fleet(per_round), classes=(kind,))
    tasks = make_tasks(DEVICES, DEVICES % 5 + 1, 10.0, down_bytes=9.0, up_bytes=5.0)
    planned = build_timetable(fleet, policy, tasks, rule)
    called = build_timetable(
        fleet, policy, tasks, rule, step_cost=lambda active, step, choice: choice.macs
    )
    for name, values in vars(called).items():
        np.testing.assert_array_equal(getattr(planned, name), values, err_msg=name, strict=True)


@few_examples
@given(per_round=rates, policy=policies, rule=rules, start=st.sampled_from([0.0, 17.25, 4000.0]))
def test_timetables_conserve_work(per_round, policy, rule, start):
    fleet = make_fleet(per_round, round_seconds=2.0)
    tasks = make_tasks(DEVICES, 1 + DEVICES % 5, 1e6)
    table = build_timetable(fleet, policy, tasks, rule, start=start, step_cost=noisy)
    speeds = fleet.compute_speeds(DEVICES, start, 3 * table.closed_at).scale(
        tasks.full_macs.sum(axis=1) / 2.0
    )
    for step in range(5):
        ended = np.isfinite(table.end[:, step])
        start_times, end_times = (
            np.where(ended, times[:, step], 0.0) for times in (table.start, table.end)
        )
        done = speeds.work(end_times) - speeds.work(start_times)
        assert done[ended] == pytest.approx(table.macs[ended, step], rel=1e-9)
    assert table.spent == pytest.approx(speeds.work(table.busy), rel=1e-9)
    assert (table.useful <= table.spent * (1 + 1e-12)).all()
    assert (table.spent <= table.available * (1 + 1e-8)).all()


@few_examples
@given(per_round=rates, policy=policies, rule=rules, start=st.sampled_from([0.0, 17.25]))
def test_work_is_conserved_if_speeds_change_between_mini_batches(per_round, policy, rule, start):
    fleet, tasks = make_fleet(per_round), make_tasks(DEVICES, 1 + DEVICES % 5, 1e6)
    rule = msgspec.structs.replace(rule, changes="batch")
    table = build_timetable(fleet, policy, tasks, rule, start=start, step_cost=noisy)
    full_speed = tasks.full_macs.sum(axis=1)
    for index, step in zip(*np.nonzero(np.isfinite(table.end)), strict=True):
        speed = fleet.device(int(DEVICES[index])).speed(start + table.start[index, step])
        seconds = table.end[index, step] - table.start[index, step]
        assert seconds * speed * full_speed[index] == pytest.approx(table.macs[index, step])
    assert (table.useful <= table.spent * (1 + 1e-12)).all()
    assert (table.spent <= table.available * (1 + 1e-8)).all()
    if per_round == 0:
        anytime = msgspec.structs.replace(rule, changes="anytime")
        other = build_timetable(fleet, policy, tasks, anytime, start=start, step_cost=noisy)
        assert table.spent == pytest.approx(other.spent)
        assert table.available == pytest.approx(other.available)


@few_examples
@given(per_round=rates, policy=policies, rule=rules, seed=st.integers(0, 20))
def test_every_outcome_fits_the_steps_of_its_task(per_round, policy, rule, seed):
    tasks = make_tasks(DEVICES, 1 + DEVICES % 5, 1e6)
    table = build_timetable(
        make_fleet(per_round), policy, tasks, rule, seed=seed, target_updates=9, step_cost=noisy
    )
    steps = np.count_nonzero(tasks.full_macs, axis=1)
    finished = table.outcomes == TaskOutcome.FINISHED
    partial = table.outcomes == TaskOutcome.PARTIAL
    counts = finished | partial
    assert counts.sum() <= 9
    assert (table.used_steps[finished] == steps[finished]).all()
    assert (table.used_steps[partial] >= 1).all()
    assert (table.used_steps[partial] < steps[partial]).all()
    assert (table.used_steps[~counts] == 0).all()
    assert (table.arrival[counts] <= table.closed_at).all()
    assert (table.row[np.isinf(table.start)] == -1).all()
    assert (table.start[:, 1:] >= table.end[:, :-1])[np.isfinite(table.start[:, 1:])].all()


@few_examples
@given(
    per_round=rates, policy=policies, dropout=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 20)
)
def test_partial_is_never_less_useful_than_discard(per_round, policy, dropout, seed):
    fleet, tasks = make_fleet(per_round), make_tasks(DEVICES, 6, 1e6)
    discard, partial = (
        build_timetable(fleet, policy, tasks, rule, seed=seed, step_cost=noisy)
        for rule in (RoundRules(dropout=dropout), RoundRules(late="partial", dropout=dropout))
    )
    assert (partial.useful >= discard.useful).all()
    assert np.array_equal(partial.end, discard.end)


@few_examples
@given(per_round=rates, row=st.sampled_from([(0.25,), (0.6,), (1.0,)]), factor=st.floats(1.0, 3.0))
def test_more_speed_never_finishes_a_fixed_subnet_later(per_round, row, factor):
    base = devices.ChangingTrace(low=0.25, high=1.0, per_round=per_round)
    slow = Fleet(size=100, speed=devices.ProductTrace((base, ConstantTrace(1.0))))
    fast = Fleet(size=100, speed=devices.ProductTrace((base, ConstantTrace(factor))))
    tasks, wait = make_tasks(DEVICES, 5, 1e6), RoundRules(late="wait")
    first, second = (
        build_timetable(fleet, PerRound(CostRows(row)), tasks, wait) for fleet in (slow, fast)
    )
    assert (second.end <= first.end * (1 + 1e-12)).all()
    assert second.closed_at <= first.closed_at * (1 + 1e-12)


@few_examples
@given(policy=policies, rule=rules, seed=st.integers(0, 20))
def test_a_trace_without_changes_is_constant(policy, rule, seed):
    tasks = make_tasks(DEVICES, 6, 1e6)
    constant = Fleet(size=100, speed=ConstantTrace(0.25, 1.0))
    a = build_timetable(make_fleet(0.0), policy, tasks, rule, seed=seed, start=3.0, step_cost=noisy)
    b = build_timetable(constant, policy, tasks, rule, seed=seed, start=3.0, step_cost=noisy)
    assert np.array_equal(a.end, b.end)
    assert np.array_equal(a.outcomes, b.outcomes)
    assert np.array_equal(a.spent, b.spent)


@few_examples
@given(per_round=rates, policy=policies, index=st.integers(0, 11), start=st.floats(0, 1e4))
def test_a_device_has_the_same_timetable_alone_and_with_others(per_round, policy, index, start):
    fleet = make_fleet(per_round)
    everyone = build_timetable(
        fleet, policy, make_tasks(DEVICES, 1 + DEVICES % 5, 1e6), start=start
    )
    device = DEVICES[index : index + 1]
    alone = build_timetable(fleet, policy, make_tasks(device, 1 + device % 5, 1e6), start=start)
    width = alone.end.shape[1]
    assert np.array_equal(alone.end[0], everyone.end[index, :width])
    assert np.array_equal(alone.row[0], everyone.row[index, :width])
    assert alone.spent[0] == everyone.spent[index]
    assert alone.outcomes[0] == everyone.outcomes[index]


@few_examples
@given(per_round=rates, start=st.floats(0, 1e4), seed=st.integers(0, 20))
def test_all_methods_see_the_same_traces(per_round, start, seed):
    tasks = make_tasks(DEVICES, 6, 1e6)
    tables = [
        build_timetable(make_fleet(per_round), policy, tasks, STRICT, seed=seed, start=start)
        for policy in POLICIES
    ]
    for table in tables[1:]:
        assert np.array_equal(table.available, tables[0].available)


@few_examples
@given(batches=st.integers(1, 60), full=st.floats(1.0, 1e10), length=st.floats(0.01, 1e5))
def test_full_resources_always_finish_with_the_full_network(batches, full, length):
    fleet = Fleet(size=3, speed=ConstantTrace(1.0), round_seconds=length)
    for policy in BASIC_POLICIES:
        table = build_timetable(fleet, policy, make_tasks(np.arange(3), batches, full))
        assert (table.outcomes == TaskOutcome.FINISHED).all()
        assert (table.macs == full).all()


def run_reference(device, steps, full, margin=1.0, choose=None):
    """Run one device's mini-batches one by one with plain arithmetic; return their ends."""
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
        now = device.finish_time(now, row / steps)
        ends.append(now)
    return [end for end in ends if end <= 1.0 + 1e-9]


@pytest.mark.parametrize("per_round", [0.0, 1.0, 6.0])
@pytest.mark.parametrize(
    ("policy", "choose"),
    [(PerRound(ROWS), "round"), (PerBatch(ROWS), "as-written"), (PerBatch(ROWS, "paced"), "paced")],
)
def test_the_timetable_agrees_with_a_simple_reference(per_round, policy, choose):
    fleet = make_fleet(per_round)
    table = build_timetable(fleet, policy, make_tasks(DEVICES, 5, 1e6), STRICT)
    for index, device in enumerate(DEVICES):
        ends = run_reference(fleet.device(int(device)), 5, 1e6, choose=choose)
        assert np.isfinite(table.end[index]).sum() == len(ends)
        assert table.end[index, : len(ends)] == pytest.approx(ends, rel=1e-9)


def test_the_start_status_gives_what_a_per_round_policy_chooses():
    fleet, policy, tasks = make_fleet(2.0), PerRound(ROWS), make_tasks(DEVICES, 5, 1e6)
    status = compute_start_status(fleet, tasks, seed=4, start=8.0)
    fixed = devices.FixedChoice(status, policy.choose(status))
    a, b = (build_timetable(fleet, p, tasks, seed=4, start=8.0) for p in (policy, fixed))
    assert np.array_equal(a.end, b.end)
    assert np.array_equal(a.row, b.row)


def test_useful_macs_are_the_actual_ones():
    fleet, tasks = Fleet(size=2, speed=ConstantTrace(1.0)), make_tasks(np.arange(2), 2, 10.0)
    table = build_timetable(
        fleet, FULL_NETWORK, tasks, RoundRules(grace=1.0), step_cost=lambda d, s, c: c.macs * 1.5
    )
    assert table.planned.sum(axis=1).tolist() == [20.0, 20.0]
    assert table.useful.tolist() == [30.0, 30.0]


def test_a_round_without_devices_is_empty():
    table = build_timetable(make_fleet(1.0), PerBatch(ROWS), make_tasks(DEVICES[:0], 5, 1e6))
    assert (len(table.outcomes), table.closed_at) == (0, 1.0)


def test_devices_without_mini_batches_are_refused():
    with pytest.raises(ValueError, match="at least one mini-batch per device"):
        make_tasks(DEVICES, np.minimum(DEVICES, 3), 1.0)


@pytest.mark.parametrize("policy", [PerBatch, PerRound])
@pytest.mark.parametrize(("speed", "is_short"), [(0.1, True), (0.25, False), (0.9, False)])
def test_a_budget_below_the_smallest_row_runs_that_row_and_records_it(policy, speed, is_short):
    table = run_device(ConstantTrace(speed), policy(THREE_ROWS))
    started = np.isfinite(table.start)
    assert (table.row[started] >= 0).all()
    assert (table.is_short[started] == is_short).all()
    if is_short:
        assert (table.row[started] == 0).all()
