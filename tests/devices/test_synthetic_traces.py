import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices import ChangingTrace, ConstantTrace, Fleet, OnOffWindows, SteppedTrace

rates = st.sampled_from([0.0, 1e-9, 0.01, 0.5, 1.0, 4.0, 30.0])


def changing_fleet(per_round, round_seconds=1.0):
    speed = ChangingTrace(low=0.25, high=1.0, per_round=per_round)
    return Fleet(size=1_000_000, speed=speed, round_seconds=round_seconds)


def make_device(speed):
    return Fleet(size=1, speed=speed).device(0)


@given(device=st.integers(0, 999_999), seed=st.integers(0, 9), start=st.floats(0, 1e5))
def test_a_changing_trace_without_changes_is_constant(device, seed, start):
    unchanging = changing_fleet(0.0).device(device, seed=seed)
    constant = Fleet(size=1_000_000, speed=ConstantTrace(0.25, 1.0)).device(device, seed=seed)
    assert unchanging.speed(start) == constant.speed(0.0)
    assert unchanging.work(start, start + 2.0) == constant.work(start, start + 2.0)


@given(index=st.integers(0, 999_999), per_round=rates, start=st.floats(0, 1e4), cut=st.floats(0, 3))
def test_the_work_of_an_interval_is_the_sum_of_its_parts(index, per_round, start, cut):
    device = changing_fleet(per_round).device(index)
    middle = start + cut
    parts = device.work(start, middle) + device.work(middle, start + 3.0)
    assert device.work(start, start + 3.0) == pytest.approx(parts, rel=1e-9)
    speeds = device.compute_speeds(start, 3.0)
    if np.abs(speeds.times - cut).min() > 1e-6:  # start + cut is rounded
        assert device.speed(middle) == speeds.speed(np.array([cut]))[0]


@given(per_round=rates, start=st.floats(0, 1e4), seed=st.integers(0, 5))
def test_speeds_do_not_depend_on_order_or_on_other_devices(per_round, start, seed):
    devices = np.array([5, 999_999, 17, 123_456])
    fleet = changing_fleet(per_round)
    together = fleet.compute_speeds(devices, start, 2.0, seed=seed)
    for row in (2, 0, 3, 1):
        alone = fleet.compute_speeds(devices[row : row + 1], start, 2.0, seed=seed)
        width = alone.times.shape[1]
        assert alone.total[0] == together.total[row]
        assert np.array_equal(alone.times[0], together.times[row, :width])
        assert np.array_equal(alone.levels[0], together.levels[row, :width])


@given(per_round=rates, start=st.floats(0, 1e3), scale=st.sampled_from([0.5, 2.0, 1024.0]))
def test_a_longer_round_stretches_the_trace(per_round, start, scale):
    short = changing_fleet(per_round).device(3)
    long = changing_fleet(per_round, round_seconds=scale).device(3)
    assert long.work(start * scale, (start + 1) * scale) == pytest.approx(
        scale * short.work(start, start + 1), rel=1e-9
    )


@pytest.mark.parametrize("start", [0.0, 9_999.3])
@pytest.mark.parametrize("per_round", [0.5, 4.0])
def test_changes_are_a_poisson_process_and_levels_are_uniform(per_round, start):
    speeds = changing_fleet(per_round).compute_speeds(np.arange(20_000), start, 1.0)
    changes = ((speeds.times > 0) & (speeds.times < 1.0)).sum(axis=1)
    assert changes.mean() == pytest.approx(per_round, rel=0.03)
    assert changes.var() == pytest.approx(per_round, rel=0.05)
    for at in (0.0, 0.5):
        speed = speeds.speed(np.full(20_000, at))
        assert np.bincount(((speed - 0.25) / 0.075).astype(int)) == pytest.approx(2000, abs=200)
    gap = np.where(changes > 0, np.where(speeds.times > 0, speeds.times, np.inf).min(axis=1), 1.0)
    assert gap.mean() == pytest.approx((1 - np.exp(-per_round)) / per_round, rel=0.03)
    before, after = speeds.speed(np.zeros(20_000)), speeds.speed(np.full(20_000, 0.5))
    share_unchanged = (before == after).mean()
    assert share_unchanged == pytest.approx(np.exp(-per_round / 2), abs=0.01)


def test_speeds_carry_over_from_round_to_round():
    devices = np.arange(5_000)
    fleet = changing_fleet(1.0)
    first, second = (fleet.compute_speeds(devices, start, 1.0) for start in (7.0, 8.0))
    assert np.array_equal(first.speed(np.full(5_000, 1 - 1e-12)), second.speed(np.zeros(5_000)))


def test_an_inverted_or_infinite_range_is_rejected():
    with pytest.raises(
        ValueError, match=r"low <= high - in ChangingTrace, got low 1.0 and high 0.5"
    ):
        ChangingTrace(low=1.0, high=0.5)
    with pytest.raises(ValueError, match=r"a finite number - at `\$.low` of ConstantTrace"):
        ConstantTrace(float("inf"))
    with pytest.raises(ValueError, match=r"at `\$.per_round` of ChangingTrace, got -1.0"):
        ChangingTrace(per_round=-1.0)


def test_steps_hold_their_last_speed():
    device = make_device(SteppedTrace(times=(0.0, 1.0, 3.0), speeds=(1.0, 0.0, 0.5)))
    speeds = [device.speed(time) for time in (0.0, 0.99, 1.0, 2.5, 3.0, 99.0)]
    assert speeds == [1, 1, 0, 0, 0.5, 0.5]
    assert device.work(0.5, 5.0) == 1.5
    assert device.finish_time(0.5, 1.0) == 4.0


def test_steps_repeat_with_their_period():
    device = make_device(SteppedTrace(times=(0.0, 1.0), speeds=(1.0, 0.0), period=4.0))
    assert device.work(0.5, 9.0) == 2.5
    assert device.finish_time(0.5, 1.5) == 5.0
    assert device.finish_time(0.5, 1.6) == pytest.approx(8.1)
    assert device.speed(1e6) == 1.0


@given(start=st.floats(0, 1e5), length=st.floats(0, 50), period=st.sampled_from([0.1, 0.3, 7.0]))
def test_a_repeated_pattern_does_the_same_work_in_every_cycle(start, length, period):
    windows = OnOffWindows(windows=((0.0, period / 4), (period / 2, period)), period=period)
    device = make_device(windows)
    cycles, rest = divmod(length, period)
    expected = cycles * 0.75 * period + device.work(start, start + rest)
    assert device.work(start, start + length) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_cycles_stay_in_order_despite_rounding():
    period = 1.53641868  # rounding puts the end of some cycles after the start of the next
    windows = OnOffWindows(windows=((0.0, period),), period=period)
    speeds = Fleet(size=1, speed=windows).compute_speeds(np.array([0]), 0.0, 1000 * period)
    assert (np.diff(speeds.times[0]) >= 0).all()


@pytest.mark.parametrize(
    "trace", [OnOffWindows(windows=(), period=1.0), SteppedTrace(times=(0.0,), speeds=(0.0,))]
)
def test_a_device_without_any_speed_never_finishes(trace):
    assert make_device(trace).finish_time(0.0, 1.0, max_rounds=64) == np.inf


@pytest.mark.parametrize(
    ("make_trace", "message"),
    [
        (lambda: SteppedTrace(times=(0.0, 1.0), speeds=(1.0,)), r"as many times as speeds \(1\)"),
        (lambda: SteppedTrace(times=(1.0,), speeds=(1.0,)), "start at 0 and rise"),
        (lambda: SteppedTrace(times=(0.0, 2.0), speeds=(1.0, 1.0), period=2.0), "rise below 2.0"),
        (lambda: OnOffWindows(windows=((2.0, 1.0),), period=4.0), "windows in order"),
        (lambda: OnOffWindows(windows=((1.0, 5.0),), period=4.0), "none past 4.0"),
    ],
)
def test_wrong_steps_and_windows_are_rejected(make_trace, message):
    with pytest.raises(ValueError, match=message):
        make_trace()
