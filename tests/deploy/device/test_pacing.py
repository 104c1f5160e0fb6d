from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.deploy.device.pacing import RESERVE, MeasuredPacer
from pliant.deploy.step_times import (
    StepTimeCurve,
    build_curve,
    measure_step_times,
    parse_curve,
)
from pliant.devices import FULL_NETWORK, CostRows, PerBatch
from pliant.engine.round_tasks import LocalWork
from pliant.nn.elastic import elastic

SHARES = tuple(np.linspace(0.1, 1.0, 19).tolist())
# half of the filters: a quarter of the MACs, half of the time
CURVE = StepTimeCurve(np.array(SHARES), 0.1 * np.sqrt(np.array(SHARES)))
POLICY = PerBatch(CostRows(SHARES))


class Machine:
    """A clock that advances with the work done, at a speed that may change."""

    def __init__(self, slowdown=lambda step: 1.0, miscalibration=1.0):
        self.now = self.cpu_time = 0.0
        self.slowdown, self.miscalibration = slowdown, miscalibration

    def run(self, pacer, steps=10_000):
        """Run steps until the pacer stops; return the MACs of each."""
        macs = []
        for step in range(steps):
            choice = pacer.choose(step)
            if choice is None:
                break
            macs.append(choice[1])
            seconds = CURVE.seconds_for(choice[1]) * self.miscalibration
            self.cpu_time += seconds
            self.now += seconds * self.slowdown(step)
        return macs


def make_pacer(machine, *, seconds, policy=POLICY, batches=40, **options):
    work = LocalWork((1,) * batches, 1.0)
    clocks = {"clock": lambda: machine.now, "cpu_clock": lambda: machine.cpu_time}
    return MeasuredPacer(policy, work, seconds=seconds, **{"curve": CURVE} | clocks | options)


def test_with_enough_time_it_trains_the_full_network():
    machine = Machine()
    assert machine.run(make_pacer(machine, seconds=6.0)) == pytest.approx([1.0] * 40)


def test_it_fits_time_rather_than_macs():
    machine = Machine()
    macs = machine.run(make_pacer(machine, seconds=40 * 0.05 / (1 - RESERVE)))
    # on this machine, half of the time is a quarter of the MACs
    assert np.mean(macs) == pytest.approx(0.25, abs=0.03)
    assert machine.now <= 40 * 0.05 / (1 - RESERVE)


def test_contention_in_the_middle_changes_the_rates_within_two_mini_batches():
    machine = Machine(slowdown=lambda step: 2.0 if step >= 15 else 1.0)
    macs = machine.run(make_pacer(machine, seconds=40 * 0.1 / (1 - RESERVE)))
    assert min(macs[:16]) > 0.9
    assert max(macs[17:]) < 0.6  # steps 15 and 16 were slow, step 17 reacts
    assert len(macs) == 40
    assert machine.now <= 40 * 0.1 / (1 - RESERVE)


def test_without_a_choice_of_rates_the_same_contention_is_too_much():
    machine = Machine(slowdown=lambda step: 2.0 if step >= 15 else 1.0)
    pacer = make_pacer(machine, seconds=40 * 0.1 / (1 - RESERVE), policy=FULL_NETWORK)
    assert len(machine.run(pacer)) < 40


def test_one_outlier_changes_no_rate():
    rows = []
    for machine in (Machine(), Machine(slowdown=lambda step: 5.0 if step == 10 else 1.0)):
        pacer = make_pacer(machine, seconds=60.0)
        machine.run(pacer)
        rows.append(pacer.rows)
    assert rows[0][11:14] == rows[1][11:14]


def test_when_the_other_program_ends_the_rates_rise_again():
    machine = Machine(slowdown=lambda step: 2.0 if 10 <= step < 20 else 1.0)
    macs = machine.run(make_pacer(machine, seconds=40 * 0.1 / (1 - RESERVE)))
    assert np.mean(macs[24:]) > np.mean(macs[13:20])


@given(
    slowdowns=st.lists(st.floats(0.5, 3.0), min_size=40, max_size=40),
    margin=st.floats(1.0, 3.0),
)
def test_it_ends_in_time_whenever_the_smallest_row_would(slowdowns, margin):
    machine = Machine(slowdown=lambda step: slowdowns[step])
    least = sum(slowdowns) * CURVE.seconds_for(0.1)
    seconds = 3 * least * margin + 1.0  # it reacts after three slow steps at full width
    assert len(machine.run(make_pacer(machine, seconds=seconds))) == 40
    assert machine.now <= seconds


def test_with_partial_updates_it_starts_no_step_that_cannot_finish():
    machine = Machine()
    pacer = make_pacer(
        machine, seconds=1.05, policy=FULL_NETWORK, server_choice=(0, 1.0), is_partial=True
    )
    assert len(machine.run(pacer)) == 10
    assert machine.now <= 1.05


def test_sleeping_limits_the_share_of_the_core():
    machine = Machine()

    def sleep(seconds):
        machine.now += seconds

    machine.run(make_pacer(machine, seconds=100.0, cpu_share=0.25, sleep=sleep))
    assert machine.now == pytest.approx(40 * 0.1 / 0.25)


def test_times_are_in_order():
    machine = Machine()
    pacer = make_pacer(machine, seconds=6.0)
    machine.run(pacer)
    assert len(pacer.times) == len(pacer.rows) + 1
    assert pacer.times == sorted(pacer.times)


@pytest.mark.parametrize(
    "points", [(), ((1.0,),), ((1.0, float("nan")),), ((1.0, 2.0), (0.5, 1.0)), ((0.0, 1.0),)]
)
def test_an_implausible_curve_is_none(points):
    assert parse_curve(points) is None


@given(st.floats(0.001, 10.0))
def test_a_curve_and_its_inverse_agree(seconds):
    share = CURVE.share_within(seconds)
    if SHARES[0] <= share <= SHARES[-1]:
        assert CURVE.seconds_for(share) == pytest.approx(seconds, rel=1e-9)


def test_rounds_correct_a_miscalibrated_curve():
    curve = CURVE
    for _ in range(8):
        machine = Machine(miscalibration=1.5)
        pacer = make_pacer(machine, seconds=5.0, curve=curve)
        machine.run(pacer)
        curve = pacer.refine_curve()
    assert curve.seconds == pytest.approx(1.5 * CURVE.seconds, rel=0.02)


def test_another_program_does_not_change_the_curve():
    machine = Machine(slowdown=lambda step: 3.0)
    pacer = make_pacer(machine, seconds=5.0)
    machine.run(pacer)
    assert pacer.slowdown == pytest.approx(3.0)
    assert pacer.refine_curve().seconds == pytest.approx(CURVE.seconds)


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_device_plans_without_the_grace_but_works_on_until_it_is_over(is_partial):
    # three full mini-batches of 0.1 s fit before 0.3 s, and a fourth within the grace
    options = {"policy": FULL_NETWORK, "seconds": 0.301, "is_partial": is_partial}
    counts = []
    for grace in (0.0, 0.1, 0.2):
        machine = Machine()
        counts.append(len(machine.run(make_pacer(machine, grace=grace, **options))))
    assert counts == ([3, 4, 5] if is_partial else [4, 5, 6])
    machines = Machine(), Machine()
    macs = [
        machine.run(make_pacer(machine, seconds=2.0, grace=grace))
        for machine, grace in zip(machines, (0.0, 1.0), strict=True)
    ]
    assert macs[0] == macs[1]


def test_a_round_without_mini_batches_leaves_the_curve():
    machine = Machine()
    pacer = make_pacer(machine, seconds=1e-9, is_partial=True)
    assert machine.run(pacer) == []
    assert pacer.refine_curve() is CURVE


def test_a_small_last_mini_batch_counts_in_proportion():
    machine = Machine()
    work = LocalWork((4, 4, 4, 4, 1), 1.0)
    pacer = MeasuredPacer(
        POLICY,
        work,
        CURVE,
        seconds=9.0,
        clock=lambda: machine.now,
        cpu_clock=lambda: machine.cpu_time,
    )
    for step in range(6):
        pacer.choose(step)
        machine.cpu_time += 0.1 * (0.25 if step == 4 else 1.0)
        machine.now = machine.cpu_time
    assert pacer.refine_curve().seconds == pytest.approx(CURVE.seconds)


@given(st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(1e-6, 1e3)), max_size=40))
def test_a_refined_curve_is_a_valid_curve(steps):
    shares, seconds = zip(*steps, strict=True) if steps else ((), ())
    curve = CURVE.refine(shares, np.array(seconds))
    assert parse_curve(list(zip(curve.shares, curve.seconds, strict=True))) is not None


@pytest.mark.parametrize("is_partial", [True, False])
def test_an_open_ended_task_fills_the_round_with_the_last_row(is_partial):
    machine = Machine()
    policy = PerBatch(CostRows(SHARES), "unlimited", last_row=3)  # .25 of the MACs: .05 s
    pacer = make_pacer(
        machine, seconds=2.01, policy=policy, batches=80, open_passes=4, is_partial=is_partial
    )
    assert machine.run(pacer) == pytest.approx([0.25] * (40 if is_partial else 38))
    assert machine.now <= 2.01 * (1 if is_partial else 1 - RESERVE)


def test_an_open_ended_task_adapts_to_the_slot_of_one_pass():
    machine = Machine()
    # a pass of 20 full mini-batches would take twice the round: half of the time each
    pacer = make_pacer(
        machine, seconds=1.0 / (1 - RESERVE), batches=80, open_passes=4, is_partial=True
    )
    macs = machine.run(pacer)
    assert macs == pytest.approx([0.25] * len(macs), abs=0.03)
    assert len(macs) >= 20


@pytest.mark.parametrize("tick", [0.0, 0.01])
def test_a_coarse_clock_gives_a_curve_too(tick):
    """As the clock of CPU time is where that time is limited."""
    readings = count()

    def read_clock():
        return tick * (next(readings) // 4)

    net = elastic(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
    x, y = torch.zeros(2, 4), torch.tensor([0, 1])
    curve = build_curve(net, measure_step_times(net, x, y, clock=read_clock))
    assert parse_curve(curve.points) is not None
