import sys
import tracemalloc

import numpy as np
import pytest

from pliant.devices import (
    ChangingTrace,
    ConstantTrace,
    DeviceClass,
    Fleet,
    OnOffWindows,
    RecordedAvailability,
)
from pliant.engine.selection import select_devices


def draw(fleet, count, selection="uniform", *, seed=0, round=0, now=0.0):
    return select_devices(fleet, count, selection, seed=seed, round=round, now=now)


@pytest.mark.parametrize("selection", ["uniform", "available"])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (10, 3), (10, 10), (10, 99), (1000, 10)])
def test_devices_are_drawn_without_replacement_in_rising_order(selection, size, count):
    devices = draw(Fleet(size=size), count, selection)
    assert len(devices) == min(size, count)
    assert (np.diff(devices) > 0).all()
    assert devices.min() >= 0
    assert devices.max() < size


def test_a_draw_depends_on_seed_and_round():
    fleet = Fleet(size=1000)
    assert draw(fleet, 10).tolist() == draw(fleet, 10).tolist()
    assert draw(fleet, 10, round=1).tolist() != draw(fleet, 10).tolist()
    assert draw(fleet, 10, seed=1).tolist() != draw(fleet, 10).tolist()


@pytest.mark.parametrize("selection", ["uniform", "available"])
def test_every_device_is_drawn_equally_often(selection):
    rounds, fleet = 3000, Fleet(size=20)
    counts = np.zeros(20)
    for round in range(rounds):
        counts[draw(fleet, 5, selection, round=round)] += 1
    expected = rounds * 5 / 20
    deviation = np.sqrt(rounds * 0.25 * 0.75)
    assert abs(counts - expected).max() < 4.5 * deviation


def test_only_available_devices_are_drawn(tmp_path):
    file = tmp_path / "availability.json"
    early = '{"active": [0], "inactive": [1], "finish_time": 4}'
    late = '{"active": [2], "inactive": [3], "finish_time": 4}'
    file.write_text(f"[{early}, {late}]")
    fleet = Fleet(size=400, speed=RecordedAvailability(str(file)))
    for now, available in ((0.5, range(0, 400, 2)), (2.5, range(1, 400, 2))):
        assert set(draw(fleet, 20, "available", now=now).tolist()) <= set(available)
        assert draw(fleet, 400, "available", now=now).tolist() == list(available)


def test_no_device_is_drawn_when_none_is_available():
    fleet = Fleet(size=50, speed=OnOffWindows(windows=((1.0, 2.0),), period=4.0))
    assert len(draw(fleet, 5, "available", now=0.5)) == 0
    assert len(draw(fleet, 5, "available", now=1.5)) == 5


def test_rare_available_devices_are_found():
    unavailable = DeviceClass(share=98.0, speed=ConstantTrace(0.0))
    fleet = Fleet(size=5000, classes=(unavailable, DeviceClass(share=2.0)))
    available = np.flatnonzero(fleet.speeds_at(np.arange(5000), 0.0) > 0)
    assert 50 < len(available) < 200
    devices = draw(fleet, 40, "available")
    assert len(devices) == 40
    assert set(devices.tolist()) <= set(available.tolist())


@pytest.mark.parametrize("selection", ["uniform", "available"])
def test_a_large_fleet_costs_no_more_than_a_small_one(selection):
    def measure_cost(fleet):
        draw(fleet, 10, selection)
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += 1

        tracemalloc.start()
        sys.setprofile(count)
        draw(fleet, 10, selection)
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return calls, peak

    small, small_peak = measure_cost(Fleet(size=1_000, speed=ChangingTrace()))
    large, large_peak = measure_cost(Fleet(size=1_000_000_000, speed=ChangingTrace()))
    assert large < 2 * small  # calls, because seconds vary
    assert large_peak < 2 * small_peak + 10_000
