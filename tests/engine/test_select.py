import sys
import tracemalloc

import numpy as np
import pytest

from pliant.devices import Availability, Changing, Constant, DeviceClass, Fleet, Windows
from pliant.engine.select import selected


def draw(fleet, count, how="uniform", *, seed=0, round=0, now=0.0):
    return selected(fleet, count, how, seed=seed, round=round, now=now)


@pytest.mark.parametrize("how", ["uniform", "available"])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (10, 3), (10, 10), (10, 99), (1000, 10)])
def test_devices_are_drawn_without_replacement_in_rising_order(how, size, count):
    found = draw(Fleet(size=size), count, how)
    assert len(found) == min(size, count)
    assert (np.diff(found) > 0).all()
    assert found.min() >= 0
    assert found.max() < size


def test_a_draw_belongs_to_its_seed_and_round():
    fleet = Fleet(size=1000)
    assert draw(fleet, 10).tolist() == draw(fleet, 10).tolist()
    assert draw(fleet, 10, round=1).tolist() != draw(fleet, 10).tolist()
    assert draw(fleet, 10, seed=1).tolist() != draw(fleet, 10).tolist()


@pytest.mark.parametrize("how", ["uniform", "available"])
def test_every_device_is_drawn_equally_often(how):
    rounds, fleet = 3000, Fleet(size=20)
    counts = np.zeros(20)
    for round in range(rounds):
        counts[draw(fleet, 5, how, round=round)] += 1
    expected = rounds * 5 / 20
    deviation = np.sqrt(rounds * 0.25 * 0.75)
    assert abs(counts - expected).max() < 4.5 * deviation


def test_only_available_devices_are_drawn(tmp_path):
    file = tmp_path / "availability.json"
    early = '{"active": [0], "inactive": [1], "finish_time": 4}'
    late = '{"active": [2], "inactive": [3], "finish_time": 4}'
    file.write_text(f"[{early}, {late}]")
    fleet = Fleet(size=400, speed=Availability(str(file)))
    for now, awake in ((0.5, range(0, 400, 2)), (2.5, range(1, 400, 2))):
        assert set(draw(fleet, 20, "available", now=now).tolist()) <= set(awake)
        assert draw(fleet, 400, "available", now=now).tolist() == list(awake)


def test_nobody_is_drawn_when_nobody_is_available():
    fleet = Fleet(size=50, speed=Windows(windows=((1.0, 2.0),), period=4.0))
    assert len(draw(fleet, 5, "available", now=0.5)) == 0
    assert len(draw(fleet, 5, "available", now=1.5)) == 5


def test_rare_devices_are_found():
    asleep = DeviceClass(share=98.0, speed=Constant(0.0))
    fleet = Fleet(size=5000, classes=(asleep, DeviceClass(share=2.0)))
    awake = np.flatnonzero(fleet.speeds(np.arange(5000), 0.0) > 0)
    assert 50 < len(awake) < 200
    found = draw(fleet, 40, "available")
    assert len(found) == 40
    assert set(found.tolist()) <= set(awake.tolist())


@pytest.mark.parametrize("how", ["uniform", "available"])
def test_a_large_fleet_costs_what_a_small_one_costs(how):
    def cost(fleet):
        draw(fleet, 10, how)
        calls = 0

        def count(frame, event, found):
            nonlocal calls
            calls += 1

        tracemalloc.start()
        sys.setprofile(count)
        draw(fleet, 10, how)
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return calls, peak

    small, small_peak = cost(Fleet(size=1_000, speed=Changing()))
    large, large_peak = cost(Fleet(size=1_000_000_000, speed=Changing()))
    assert large < 2 * small  # calls, for seconds are not the same twice
    assert large_peak < 2 * small_peak + 10_000
