import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices import Availability, Fleet, Recorded, Steps, Windows


def device(speed, index=0, size=10):
    return Fleet(size=size, speed=speed).device(index)


def test_steps_hold_their_last_speed():
    one = device(Steps(times=(0.0, 1.0, 3.0), speeds=(1.0, 0.0, 0.5)))
    assert [one.speed(time) for time in (0.0, 0.99, 1.0, 2.5, 3.0, 99.0)] == [1, 1, 0, 0, 0.5, 0.5]
    assert one.work(0.5, 5.0) == 1.5
    assert one.finish(0.5, 1.0) == 4.0


def test_steps_repeat_with_their_period():
    one = device(Steps(times=(0.0, 1.0), speeds=(1.0, 0.0), period=4.0))
    assert one.work(0.5, 9.0) == 2.5
    assert one.finish(0.5, 1.5) == 5.0
    assert one.finish(0.5, 1.6) == pytest.approx(8.1)
    assert one.speed(1e6) == 1.0


@given(start=st.floats(0, 1e5), length=st.floats(0, 50), period=st.sampled_from([0.1, 0.3, 7.0]))
def test_a_repeated_pattern_does_the_same_in_every_turn(start, length, period):
    one = device(Windows(windows=((0.0, period / 4), (period / 2, period)), period=period))
    turns, rest = divmod(length, period)
    expected = turns * 0.75 * period + one.work(start, start + rest)
    assert one.work(start, start + length) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_turns_that_round_badly_stay_in_order():
    period = 1.53641868  # rounded, some of its turns end behind the start of the next
    windows = Windows(windows=((0.0, period),), period=period)
    path = Fleet(size=1, speed=windows).path(np.array([0]), 0.0, 1000 * period)
    assert (np.diff(path.times[0]) >= 0).all()


def test_a_device_without_any_speed_never_finishes():
    assert device(Windows(windows=(), period=1.0)).finish(0.0, 1.0, rounds=64) == np.inf
    assert device(Steps(times=(0.0,), speeds=(0.0,))).finish(0.0, 1.0, rounds=64) == np.inf


def test_a_device_plays_the_recording_of_its_number(tmp_path):
    file = tmp_path / "two.csv"
    file.write_text("device,seconds,speed\na,100,1.0\na,102,0.5\nb,101,0.25\n")
    speed = Recorded(path=str(file))
    assert [device(speed, index).work(0.0, 4.0) for index in range(4)] == [3.0, 1.0, 3.0, 1.0]
    repeated = Recorded(path=str(file), period=4.0)
    assert device(repeated).work(0.0, 8.0) == 6.0


def test_a_device_is_on_between_active_and_inactive(tmp_path):
    file = tmp_path / "behaviour.json"
    file.write_text(
        '{"7": {"duration": 3, "active": [1, 5], "inactive": [3, 6], "finish_time": 8,'
        ' "model": "x"},'
        ' "9": {"duration": 0, "active": [], "inactive": [], "finish_time": 8}}'
    )
    one = device(Availability(path=str(file)))
    assert [one.speed(time) for time in (0.0, 1.0, 2.9, 3.0, 5.5, 6.0, 9.5)] == [
        0,
        1,
        1,
        0,
        1,
        0,
        1,
    ]
    assert one.work(0.0, 16.0) == 6.0
    assert device(Availability(path=str(file)), 1).work(0.0, 16.0) == 0.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Steps(times=(0.0, 1.0), speeds=(1.0,)), r"as many times as speeds \(1\)"),
        (lambda: Steps(times=(1.0,), speeds=(1.0,)), "start at 0 and rise"),
        (lambda: Steps(times=(0.0, 2.0), speeds=(1.0, 1.0), period=2.0), "rise below 2.0"),
        (lambda: Windows(windows=((2.0, 1.0),), period=4.0), "windows in order"),
        (lambda: Windows(windows=((1.0, 5.0),), period=4.0), "none past 4.0"),
    ],
)
def test_what_cannot_be_played_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
