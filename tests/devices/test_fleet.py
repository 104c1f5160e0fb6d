import tracemalloc

import numpy as np
import pytest

from pliant.devices import ChangingTrace, ConstantTrace, DeviceClass, Fleet, compute_joules

PHONE = DeviceClass(name="phone", share=3.0, up=10.0, latency=0.5, joules_per_mac=2.0)
GATEWAY = DeviceClass(name="gateway", share=1.0, speed=ConstantTrace(2.0), joules_per_byte=0.25)
MIXED = Fleet(size=20_000, speed=ChangingTrace(per_round=1.0), classes=(PHONE, GATEWAY))


def test_classes_are_drawn_by_their_share():
    indices = MIXED.get_class_indices(np.arange(20_000), seed=1)
    assert (indices == 0).mean() == pytest.approx(0.75, abs=0.01)
    assert (indices != MIXED.get_class_indices(np.arange(20_000), seed=2)).any()


def test_a_class_has_its_own_speed_or_the_fleets():
    devices = np.arange(100)
    indices = MIXED.get_class_indices(devices)
    speeds = MIXED.compute_speeds(devices, 3.0, 2.0)
    plain = Fleet(size=20_000, speed=MIXED.speed).compute_speeds(devices, 3.0, 2.0)
    assert (speeds.total[indices == 1] == 4.0).all()
    assert np.array_equal(speeds.total[indices == 0], plain.total[indices == 0])


def test_costs_belong_to_the_class():
    devices = np.arange(100)
    indices, costs = MIXED.get_class_indices(devices), MIXED.get_costs(devices)
    up, down = (MIXED.compute_links(devices, way, 0.0, 1.0) for way in ("up", "down"))
    assert np.array_equal(up.constant, np.where(indices == 0, 10.0, np.inf))
    assert np.isinf(down.constant).all()
    assert np.array_equal(costs.latency, np.where(indices == 0, 0.5, 0.0))
    assert np.array_equal(costs.joules_per_mac, np.where(indices == 0, 2.0, 0.0))
    assert np.array_equal(costs.joules_per_byte, np.where(indices == 0, 0.0, 0.25))


def test_energy_is_linear_in_macs_bytes_and_idle_seconds():
    radio = DeviceClass(joules_per_mac=2.0, joules_per_byte=0.5, idle_watts=0.25)
    costs = Fleet(size=4, classes=(radio,)).get_costs(np.array([0, 3]))
    joules = compute_joules(
        costs,
        macs=np.array([10.0, 0.0]),
        transferred_bytes=np.array([0.0, 8.0]),
        idle_seconds=np.array([4.0, 8.0]),
    )
    assert joules.tolist() == [21.0, 6.0]


def test_a_device_agrees_with_its_fleet():
    device = MIXED.device(77, seed=3)
    speeds = MIXED.compute_speeds(np.array([77]), 2.0, 1.0, seed=3)
    assert device.speed(2.0) == speeds.speed(np.zeros(1))[0]
    assert MIXED.speeds_at(np.array([5, 77]), 2.0, seed=3)[1] == device.speed(2.0)
    assert device.work(2.0, 3.0) == speeds.total[0]
    assert device.finish_time(2.0, device.work(2.0, 2.9)) == pytest.approx(2.9, rel=1e-12)
    assert device.finish_time(2.0, 0.0) == 2.0


def test_finish_time_looks_as_far_ahead_as_needed():
    device = Fleet(size=1, speed=ConstantTrace(0.25)).device(0)
    assert device.finish_time(1.0, 1000.0) == 4001.0


def test_a_large_fleet_costs_memory_only_for_the_devices_used():
    devices = np.array([0, 1, 500_000, 999_999])
    peaks = []
    for size in (1_000_000, 4_000_000_000):
        tracemalloc.start()
        Fleet(size=size, speed=ChangingTrace(per_round=4.0)).compute_speeds(devices, 10_000.0, 1.0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 200_000  # bytes
    small = Fleet(size=2, speed=ChangingTrace(per_round=4.0)).compute_speeds(
        devices[:2], 10_000.0, 1.0
    )
    large = Fleet(size=1_000_000, speed=ChangingTrace(per_round=4.0)).compute_speeds(
        devices, 10_000.0, 1.0
    )
    assert np.array_equal(small.total, large.total[:2])


def test_unknown_devices_and_wrong_times_are_rejected():
    with pytest.raises(LookupError, match="from 0 to 19999, got 20000"):
        MIXED.device(20_000)
    with pytest.raises(LookupError, match="got -1"):
        MIXED.compute_speeds(np.array([3, -1]), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"Expected `int` >= 1 - at `\$.size` of Fleet, got 0"):
        Fleet(size=0)
    with pytest.raises(ValueError, match=r"at least 2.0, got 1.0"):
        MIXED.device(0).work(2.0, 1.0)
