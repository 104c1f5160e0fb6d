from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices.piecewise import PiecewiseConstant, make_constant, multiply, stack_devices


def make_speeds(times, levels, length=4.0):
    return PiecewiseConstant(np.array([times], float), np.array([levels], float), length)


def array(value):
    return np.array([value], float)


@st.composite
def speed_functions(draw, length=4.0):
    inner = draw(st.lists(st.floats(0.01, length - 0.01), max_size=5, unique=True))
    times = [0.0, *sorted(inner)]
    levels = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=6, max_size=6))
    return make_speeds(times, levels[: len(times)], length)


def test_speed_work_and_finish_time_of_two_steps():
    speeds = make_speeds([0.0, 2.0], [1.0, 0.5])
    assert speeds.speed(array(1.99))[0] == 1.0
    assert speeds.speed(array(2.0))[0] == 0.5  # a change applies from its instant on
    assert speeds.work(array(3.0))[0] == 2.5
    assert speeds.total[0] == 3.0
    assert speeds.finish_time(array(1.0), array(1.5))[0] == 3.0
    assert speeds.finish_time(array(1.0), array(2.0))[0] == 4.0
    assert speeds.finish_time(array(1.0), array(2.1))[0] == np.inf


def test_work_that_ends_at_a_pause_is_done_when_the_pause_starts():
    pause = make_speeds([0.0, 1.0, 2.0], [1.0, 0.0, 1.0])
    assert pause.finish_time(array(0.0), array(1.0))[0] == 1.0
    assert pause.finish_time(array(0.0), array(1.5))[0] == 2.5
    assert pause.finish_time(array(1.5), array(0.0))[0] == 1.5
    assert pause.finish_time(array(1.5), array(0.5))[0] == 2.5


@given(speeds=speed_functions(), at=st.floats(0, 4), share=st.floats(0, 1))
def test_finish_time_is_the_inverse_of_work(speeds, at, share):
    amount = share * (speeds.total - speeds.work(array(at)))
    end = speeds.finish_time(array(at), amount)
    if np.isfinite(end[0]):  # the last bit may be missing at the very end
        assert end[0] >= at
        gained = speeds.work(end) - speeds.work(array(at))
        assert gained[0] == pytest.approx(amount[0], rel=1e-12, abs=1e-12)
    else:
        assert share > 1 - 1e-12


@given(a=speed_functions(), b=speed_functions(), at=st.floats(0, 4))
def test_a_product_has_the_product_of_the_speeds_everywhere(a, b, at):
    product = multiply(a, b)
    assert product.speed(array(at))[0] == a.speed(array(at))[0] * b.speed(array(at))[0]
    grid = np.unique(np.concatenate([a.times[0], b.times[0], [4.0]]))
    pieces = [
        (end - start) * a.speed(array(start))[0] * b.speed(array(start))[0]
        for start, end in pairwise(grid)
    ]
    assert product.total[0] == pytest.approx(sum(pieces), abs=1e-12)


def test_stacked_devices_keep_their_positions():
    stacked = stack_devices(
        [make_speeds([0.0, 1.0], [1.0, 0.0]), make_constant(np.array([2.0, 3.0]), 4.0)],
        [np.array([1]), np.array([0, 2])],
    )
    assert stacked.total.tolist() == [8.0, 1.0, 12.0]
    assert stacked.finish_time(np.zeros(3), np.full(3, 2.0)).tolist() == [1.0, np.inf, 2.0 / 3.0]
    assert stacked.select(np.array([2])).total.tolist() == [12.0]
    assert stacked.scale(np.array([1.0, 10.0, 2.0])).total.tolist() == [8.0, 10.0, 24.0]


def test_the_latest_start_of_two_steps_and_a_pause():
    speeds = make_speeds([0.0, 2.0], [1.0, 0.5])
    assert speeds.start_time(array(3.0), array(1.5))[0] == 1.0
    assert speeds.start_time(array(3.0), array(0.25))[0] == 2.5
    assert speeds.start_time(array(3.0), array(2.6))[0] == -np.inf
    pause = make_speeds([0.0, 1.0, 2.0], [1.0, 0.0, 1.0])
    assert pause.start_time(array(1.8), array(0.5))[0] == 0.5
    assert pause.start_time(array(2.5), array(0.5))[0] == 2.0  # nothing is lost by waiting
    assert pause.start_time(array(2.5), array(0.0))[0] == 2.5


@given(speeds=speed_functions(), end=st.floats(0, 4), share=st.floats(0, 1))
def test_start_time_is_the_latest_from_which_the_work_gets_done(speeds, end, share):
    amount = share * speeds.work(array(end))
    start = np.maximum(speeds.start_time(array(end), amount), 0.0)
    assert start[0] <= end
    done = speeds.work(array(end)) - speeds.work(start)
    assert done[0] == pytest.approx(amount[0], rel=1e-12, abs=1e-12)
    later = np.minimum(start + 1e-6, end)
    is_running = speeds.work(later) > speeds.work(start)
    assert is_running[0] or later[0] - start[0] < 1e-6
