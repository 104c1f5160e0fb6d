from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices.path import Path, constant, product, stacked


def path(times, levels, length=4.0):
    return Path(np.array([times], float), np.array([levels], float), length)


def one(value):
    return np.array([value], float)


@st.composite
def paths(draw, length=4.0):
    inner = draw(st.lists(st.floats(0.01, length - 0.01), max_size=5, unique=True))
    times = [0.0, *sorted(inner)]
    levels = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=6, max_size=6))
    return path(times, levels[: len(times)], length)


def test_speed_work_and_finish_of_two_steps():
    two = path([0.0, 2.0], [1.0, 0.5])
    assert two.speed(one(1.99))[0] == 1.0
    assert two.speed(one(2.0))[0] == 0.5  # a change counts from its instant on
    assert two.work(one(3.0))[0] == 2.5
    assert two.total[0] == 3.0
    assert two.finish(one(1.0), one(1.5))[0] == 3.0
    assert two.finish(one(1.0), one(2.0))[0] == 4.0
    assert two.finish(one(1.0), one(2.1))[0] == np.inf


def test_work_is_done_at_the_first_time_even_in_front_of_a_pause():
    pause = path([0.0, 1.0, 2.0], [1.0, 0.0, 1.0])
    assert pause.finish(one(0.0), one(1.0))[0] == 1.0
    assert pause.finish(one(0.0), one(1.5))[0] == 2.5
    assert pause.finish(one(1.5), one(0.0))[0] == 1.5
    assert pause.finish(one(1.5), one(0.5))[0] == 2.5


@given(one_path=paths(), at=st.floats(0, 4), share=st.floats(0, 1))
def test_finish_is_the_inverse_of_work(one_path, at, share):
    amount = share * (one_path.total - one_path.work(one(at)))
    end = one_path.finish(one(at), amount)
    if np.isfinite(end[0]):  # the last bit may be missing at the very end
        assert end[0] >= at
        gained = one_path.work(end) - one_path.work(one(at))
        assert gained[0] == pytest.approx(amount[0], rel=1e-12, abs=1e-12)
    else:
        assert share > 1 - 1e-12


@given(a=paths(), b=paths(), at=st.floats(0, 4))
def test_a_product_has_the_product_of_the_speeds_everywhere(a, b, at):
    whole = product(a, b)
    assert whole.speed(one(at))[0] == a.speed(one(at))[0] * b.speed(one(at))[0]
    grid = np.unique(np.concatenate([a.times[0], b.times[0], [4.0]]))
    pieces = [
        (end - start) * a.speed(one(start))[0] * b.speed(one(start))[0]
        for start, end in pairwise(grid)
    ]
    assert whole.total[0] == pytest.approx(sum(pieces), abs=1e-12)


def test_stacked_paths_keep_each_device_in_its_place():
    whole = stacked(
        [path([0.0, 1.0], [1.0, 0.0]), constant(np.array([2.0, 3.0]), 4.0)],
        [np.array([1]), np.array([0, 2])],
    )
    assert whole.total.tolist() == [8.0, 1.0, 12.0]
    assert whole.finish(np.zeros(3), np.full(3, 2.0)).tolist() == [1.0, np.inf, 2.0 / 3.0]
    assert whole.rows(np.array([2])).total.tolist() == [12.0]
    assert whole.scaled(np.array([1.0, 10.0, 2.0])).total.tolist() == [8.0, 10.0, 24.0]
