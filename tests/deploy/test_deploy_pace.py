import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.deploy.curve import Curve, curve_from
from pliant.deploy.pace import RESERVE, LivePace, Work
from pliant.devices import FULL, PerBatch, Rows

SHARES = tuple(np.linspace(0.1, 1.0, 19).tolist())
# half of the filters: a quarter of the MACs, half of the time
CURVE = Curve(np.array(SHARES), 0.1 * np.sqrt(np.array(SHARES)))
PLAN = PerBatch(Rows(SHARES))


class Machine:
    """A clock that goes on with the work that is done, at a speed that may change."""

    def __init__(self, slow=lambda step: 1.0, strange=1.0):
        self.now = self.spent = 0.0
        self.slow, self.strange = slow, strange

    def run(self, pace, steps=10_000):
        chosen = []
        for step in range(steps):
            found = pace.choose(step)
            if found is None:
                break
            chosen.append(found)
            self.spent += CURVE.at(found[1]) * self.strange
            self.now += CURVE.at(found[1]) * self.strange * self.slow(step)
        return chosen


def pace_on(machine, *, seconds, plan=PLAN, batches=40, **options):
    work = Work((1,) * batches, 1.0)
    given = {"curve": CURVE, "clock": lambda: machine.now, "cpu": lambda: machine.spent} | options
    return LivePace(plan, work, seconds=seconds, **given)


def test_with_enough_time_it_takes_the_full_network():
    machine = Machine()
    chosen = machine.run(pace_on(machine, seconds=6.0))
    assert [macs for _, macs in chosen] == pytest.approx([1.0] * 40)


def test_time_is_what_it_fits_not_macs():
    machine = Machine()
    chosen = machine.run(pace_on(machine, seconds=40 * 0.05 / (1 - RESERVE)))
    # half of the time is a quarter of the MACs on this machine, and a half is not
    assert np.mean([macs for _, macs in chosen]) == pytest.approx(0.25, abs=0.03)
    assert machine.now <= 40 * 0.05 / (1 - RESERVE)


def test_contention_in_the_middle_changes_the_rates_within_two_mini_batches():
    machine = Machine(slow=lambda step: 2.0 if step >= 15 else 1.0)
    pace = pace_on(machine, seconds=40 * 0.1 / (1 - RESERVE))
    chosen = [macs for _, macs in machine.run(pace)]
    assert min(chosen[:16]) > 0.9
    assert max(chosen[17:]) < 0.6  # 15 and 16 were slow, 17 knows
    assert len(chosen) == 40
    assert machine.now <= 40 * 0.1 / (1 - RESERVE)


def test_without_rates_to_choose_the_same_contention_is_too_late():
    machine = Machine(slow=lambda step: 2.0 if step >= 15 else 1.0)
    pace = pace_on(machine, seconds=40 * 0.1 / (1 - RESERVE), plan=FULL)
    assert len(machine.run(pace)) < 40


def test_one_outlier_changes_no_rate():
    calm, hiccup = Machine(), Machine(slow=lambda step: 5.0 if step == 10 else 1.0)
    chosen = machine_choices(calm), machine_choices(hiccup)
    assert chosen[0][11:14] == chosen[1][11:14]


def machine_choices(machine):
    pace = pace_on(machine, seconds=60.0)
    return [row for row, _ in machine.run(pace)]


def test_when_the_other_program_ends_the_rates_rise_again():
    machine = Machine(slow=lambda step: 2.0 if 10 <= step < 20 else 1.0)
    chosen = [macs for _, macs in machine.run(pace_on(machine, seconds=40 * 0.1 / (1 - RESERVE)))]
    assert np.mean(chosen[24:]) > np.mean(chosen[13:20])


@given(
    slows=st.lists(st.floats(0.5, 3.0), min_size=40, max_size=40),
    margin=st.floats(1.0, 3.0),
)
def test_it_ends_in_time_whenever_the_least_row_would(slows, margin):
    machine = Machine(slow=lambda step: slows[step])
    least = sum(slows) * CURVE.at(0.1)
    seconds = 3 * least * margin + 1.0  # three slow steps at full width before it knows
    chosen = machine.run(pace_on(machine, seconds=seconds))
    assert len(chosen) == 40
    assert machine.now <= seconds


def test_what_cannot_end_in_time_is_not_begun_when_parts_count():
    machine = Machine()
    pace = pace_on(machine, seconds=1.05, plan=FULL, held=(0, 1.0), is_partial=True)
    assert len(machine.run(pace)) == 10
    assert machine.now <= 1.05


def test_a_share_of_the_core_is_kept_by_rest():
    machine = Machine()

    def rest(seconds):
        machine.now += seconds

    pace = pace_on(machine, seconds=100.0, share=0.25, sleep=rest)
    machine.run(pace)
    assert machine.now == pytest.approx(40 * 0.1 / 0.25)


def test_times_follow_one_another():
    machine = Machine()
    pace = pace_on(machine, seconds=6.0)
    machine.run(pace)
    assert len(pace.times) == len(pace.rows) + 1
    assert pace.times == sorted(pace.times)


@pytest.mark.parametrize(
    "points", [(), ((1.0,),), ((1.0, float("nan")),), ((1.0, 2.0), (0.5, 1.0)), ((0.0, 1.0),)]
)
def test_a_curve_that_makes_no_sense_is_none(points):
    assert curve_from(points) is None


@given(st.floats(0.001, 10.0))
def test_a_curve_and_its_inverse_agree(seconds):
    share = CURVE.within(seconds)
    if SHARES[0] <= share <= SHARES[-1]:
        assert CURVE.at(share) == pytest.approx(seconds, rel=1e-9)


def test_rounds_correct_the_curve_of_a_machine_that_is_not_as_it_was_measured():
    curve = CURVE
    for _ in range(8):
        machine = Machine(strange=1.5)
        pace = pace_on(machine, seconds=5.0, curve=curve)
        machine.run(pace)
        curve = pace.learnt()
    assert curve.seconds == pytest.approx(1.5 * CURVE.seconds, rel=0.02)


def test_another_program_does_not_change_the_curve():
    machine = Machine(slow=lambda step: 3.0)
    pace = pace_on(machine, seconds=5.0)
    machine.run(pace)
    assert pace.slowdown == pytest.approx(3.0)
    assert pace.learnt().seconds == pytest.approx(CURVE.seconds)


def test_a_round_without_mini_batches_teaches_nothing():
    machine = Machine()
    pace = pace_on(machine, seconds=1e-9, is_partial=True)
    assert machine.run(pace) == []
    assert pace.learnt() is CURVE


def test_a_small_last_mini_batch_counts_in_proportion():
    machine = Machine()
    work = Work((4, 4, 4, 4, 1), 1.0)
    pace = LivePace(
        PLAN, work, CURVE, seconds=9.0, clock=lambda: machine.now, cpu=lambda: machine.spent
    )
    for step in range(6):
        pace.choose(step)
        machine.spent += 0.1 * (0.25 if step == 4 else 1.0)
        machine.now = machine.spent
    assert pace.learnt().seconds == pytest.approx(CURVE.seconds)


@given(st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(1e-6, 1e3)), max_size=40))
def test_a_corrected_curve_is_a_curve(steps):
    shares, seconds = zip(*steps, strict=True) if steps else ((), ())
    found = CURVE.refined(shares, np.array(seconds))
    assert curve_from(list(zip(found.shares, found.seconds, strict=True))) is not None
