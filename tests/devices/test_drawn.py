import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices import Changing, Constant, Fleet

rates = st.sampled_from([0.0, 1e-9, 0.01, 0.5, 1.0, 4.0, 30.0])


def fleet(per_round, size=1_000_000, round_seconds=1.0):
    speed = Changing(low=0.25, high=1.0, per_round=per_round)
    return Fleet(size=size, speed=speed, round_seconds=round_seconds)


@given(device=st.integers(0, 999_999), seed=st.integers(0, 9), start=st.floats(0, 1e5))
def test_without_changes_it_is_constant(device, seed, start):
    still = fleet(0.0).device(device, seed=seed)
    constant = Fleet(size=1_000_000, speed=Constant(0.25, 1.0)).device(device, seed=seed)
    assert still.speed(start) == constant.speed(0.0)
    assert still.work(start, start + 2.0) == constant.work(start, start + 2.0)


@given(
    device=st.integers(0, 999_999), per_round=rates, start=st.floats(0, 1e4), cut=st.floats(0, 3)
)
def test_a_long_question_is_the_sum_of_two_short_ones(device, per_round, start, cut):
    one = fleet(per_round).device(device)
    middle = start + cut
    parts = one.work(start, middle) + one.work(middle, start + 3.0)
    assert one.work(start, start + 3.0) == pytest.approx(parts, rel=1e-9)
    path = one.path(start, 3.0)
    if np.abs(path.times - cut).min() > 1e-6:  # start + cut is rounded
        assert one.speed(middle) == path.speed(np.array([cut]))[0]


@given(per_round=rates, start=st.floats(0, 1e4), seed=st.integers(0, 5))
def test_answers_do_not_depend_on_the_order_or_the_company(per_round, start, seed):
    devices = np.array([5, 999_999, 17, 123_456])
    together = fleet(per_round).path(devices, start, 2.0, seed=seed)
    for place in (2, 0, 3, 1):
        alone = fleet(per_round).path(devices[place : place + 1], start, 2.0, seed=seed)
        width = alone.times.shape[1]
        assert alone.total[0] == together.total[place]
        assert np.array_equal(alone.times[0], together.times[place, :width])
        assert np.array_equal(alone.levels[0], together.levels[place, :width])


@given(per_round=rates, start=st.floats(0, 1e3), scale=st.sampled_from([0.5, 2.0, 1024.0]))
def test_a_longer_round_stretches_the_trace(per_round, start, scale):
    short = fleet(per_round).device(3)
    long = fleet(per_round, round_seconds=scale).device(3)
    assert long.work(start * scale, (start + 1) * scale) == pytest.approx(
        scale * short.work(start, start + 1), rel=1e-9
    )


@pytest.mark.parametrize("start", [0.0, 9_999.3])
@pytest.mark.parametrize("per_round", [0.5, 4.0])
def test_changes_are_a_poisson_process_and_levels_are_uniform(per_round, start):
    path = fleet(per_round).path(np.arange(20_000), start, 1.0)
    changes = ((path.times > 0) & (path.times < 1.0)).sum(axis=1)
    assert changes.mean() == pytest.approx(per_round, rel=0.03)
    assert changes.var() == pytest.approx(per_round, rel=0.05)
    for at in (0.0, 0.5):
        speed = path.speed(np.full(20_000, at))
        assert np.bincount(((speed - 0.25) / 0.075).astype(int)) == pytest.approx(2000, abs=200)
    gap = np.where(changes > 0, np.where(path.times > 0, path.times, np.inf).min(axis=1), 1.0)
    assert gap.mean() == pytest.approx((1 - np.exp(-per_round)) / per_round, rel=0.03)
    before, after = path.speed(np.zeros(20_000)), path.speed(np.full(20_000, 0.5))
    share_unchanged = (before == after).mean()
    assert share_unchanged == pytest.approx(np.exp(-per_round / 2), abs=0.01)


def test_the_state_carries_over_from_round_to_round():
    devices = np.arange(5_000)
    first, second = (fleet(1.0).path(devices, start, 1.0) for start in (7.0, 8.0))
    assert np.array_equal(first.speed(np.full(5_000, 1 - 1e-12)), second.speed(np.zeros(5_000)))


def test_a_range_upside_down_or_without_end_is_refused():
    with pytest.raises(ValueError, match=r"low <= high - in Changing, got low 1.0 and high 0.5"):
        Changing(low=1.0, high=0.5)
    with pytest.raises(ValueError, match=r"a finite number - at `\$.low` of Constant"):
        Constant(float("inf"))
    with pytest.raises(ValueError, match=r"at `\$.per_round` of Changing, got -1.0"):
        Changing(per_round=-1.0)
