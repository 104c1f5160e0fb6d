import tracemalloc

import numpy as np
import pytest

from pliant.devices import Changing, Constant, DeviceClass, Fleet

PHONE = DeviceClass(name="phone", share=3.0, up=10.0, latency=0.5, joules_per_mac=2.0)
GATEWAY = DeviceClass(name="gateway", share=1.0, speed=Constant(2.0), joules_per_byte=0.25)
MIXED = Fleet(size=20_000, speed=Changing(per_round=1.0), classes=(PHONE, GATEWAY))


def test_classes_are_drawn_by_their_share():
    kinds = MIXED.class_of(np.arange(20_000), seed=1)
    assert (kinds == 0).mean() == pytest.approx(0.75, abs=0.01)
    assert [MIXED.device(i, seed=1).kind for i in range(20)] == [
        MIXED.classes[kind] for kind in kinds[:20]
    ]
    assert (kinds != MIXED.class_of(np.arange(20_000), seed=2)).any()


def test_a_class_has_its_own_speed_or_the_fleets():
    devices = np.arange(100)
    kinds = MIXED.class_of(devices)
    path = MIXED.path(devices, 3.0, 2.0)
    plain = Fleet(size=20_000, speed=MIXED.speed).path(devices, 3.0, 2.0)
    assert (path.total[kinds == 1] == 4.0).all()
    assert np.array_equal(path.total[kinds == 0], plain.total[kinds == 0])


def test_traits_belong_to_the_class():
    devices = np.arange(100)
    kinds, traits = MIXED.class_of(devices), MIXED.traits(devices)
    assert np.array_equal(traits.up, np.where(kinds == 0, 10.0, np.inf))
    assert np.isinf(traits.down).all()
    assert np.array_equal(traits.latency, np.where(kinds == 0, 0.5, 0.0))
    assert np.array_equal(traits.joules_per_mac, np.where(kinds == 0, 2.0, 0.0))
    assert np.array_equal(traits.joules_per_byte, np.where(kinds == 0, 0.0, 0.25))


def test_a_device_answers_as_its_fleet():
    one = MIXED.device(77, seed=3)
    path = MIXED.path(np.array([77]), 2.0, 1.0, seed=3)
    assert one.speed(2.0) == path.speed(np.zeros(1))[0]
    assert MIXED.speeds(np.array([5, 77]), 2.0, seed=3)[1] == one.speed(2.0)
    assert one.work(2.0, 3.0) == path.total[0]
    assert one.finish(2.0, one.work(2.0, 2.9)) == pytest.approx(2.9, rel=1e-12)
    assert one.finish(2.0, 0.0) == 2.0


def test_finish_looks_as_far_ahead_as_needed():
    one = Fleet(size=1, speed=Constant(0.25)).device(0)
    assert one.finish(1.0, 1000.0) == 4001.0


def test_a_million_devices_cost_only_those_looked_at():
    devices = np.array([0, 1, 500_000, 999_999])
    peaks = []
    for size in (1_000_000, 4_000_000_000):
        tracemalloc.start()
        Fleet(size=size, speed=Changing(per_round=4.0)).path(devices, 10_000.0, 1.0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 200_000  # bytes
    small = Fleet(size=2, speed=Changing(per_round=4.0)).path(devices[:2], 10_000.0, 1.0)
    large = Fleet(size=1_000_000, speed=Changing(per_round=4.0)).path(devices, 10_000.0, 1.0)
    assert np.array_equal(small.total, large.total[:2])


def test_strangers_are_refused():
    with pytest.raises(LookupError, match="from 0 to 19999, got 20000"):
        MIXED.device(20_000)
    with pytest.raises(LookupError, match="got -1"):
        MIXED.path(np.array([3, -1]), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"Expected `int` >= 1 - at `\$.size` of Fleet, got 0"):
        Fleet(size=0)
    with pytest.raises(ValueError, match=r"at least 2.0, got 1.0"):
        MIXED.device(0).work(2.0, 1.0)
