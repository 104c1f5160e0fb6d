import math

import numpy as np
import pytest

from pliant.devices import Fleet, get_device_classes
from pliant.devices.named_classes import FLHETBENCH_KBITS


def test_flhetbench_has_the_middle_of_each_fifth_of_speeds_and_links():
    classes = get_device_classes("flhetbench-4")
    assert [c.share for c in classes] == [1.0] * 25
    # latencies of 69 to 475.6 ms around a median of 172 ms; 8005 to 87019 kbit/s
    assert classes[0].speed.low == 172 / 69
    assert (classes[0].up, classes[0].down) == (1_000_625.0, 1_000_625.0)
    assert classes[-1].speed.low == 172 / 475.6
    assert classes[-1].up == 10_877_375.0
    assert classes[12].speed.low == 1.0
    assert len({c.name for c in classes}) == 25


def test_links_become_less_equal_from_case_to_case():
    spreads = []
    for name in FLHETBENCH_KBITS:
        links = sorted({c.up for c in get_device_classes(name)})
        spreads.append(links[-1] / links[0])
        assert links[2] == pytest.approx(41e6 / 8, rel=0.03)  # the median stays
    assert spreads == sorted(spreads)


def test_fedscale_has_log_normal_times_per_sample():
    times = [-math.log(c.speed.low) for c in get_device_classes("fedscale")]
    # 0.6 times the quantiles 10 %, 30 %, … of a normal variable
    assert times == pytest.approx([-0.769, -0.315, 0.0, 0.315, 0.769], abs=5e-4)
    assert all(c.up is None for c in get_device_classes("fedscale"))


@pytest.mark.parametrize("name", [*FLHETBENCH_KBITS, "fedscale"])
def test_a_fleet_of_named_classes_has_the_median_speed_1(name):
    fleet = Fleet(size=20_000, classes=get_device_classes(name))
    speeds = fleet.speeds_at(np.arange(20_000), 0.0)
    assert np.median(speeds) == 1.0
    assert np.mean(speeds < 1) == pytest.approx(0.4, abs=0.02)


def test_an_unknown_name_is_corrected():
    with pytest.raises(LookupError, match=r"unknown device classes 'fedscal'.*fedscale"):
        get_device_classes("fedscal")
