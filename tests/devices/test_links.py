from itertools import product

import numpy as np
import pytest

from pliant.devices import (
    ChangingTrace,
    ConstantTrace,
    DeviceClass,
    Fleet,
    OnOffWindows,
    ProductTrace,
    RecordedAvailability,
    RecordedTrace,
    SteppedTrace,
)

STEPPED = SteppedTrace(times=(0.0, 2.0, 3.0), speeds=(100.0, 0.0, 50.0))


def compute_links(link, count=1, start=0.0, length=9.0, direction="up"):
    fleet = Fleet(size=100, classes=(DeviceClass(**{direction: link}),))
    return fleet.compute_links(np.arange(count), direction, start, length)


def array(value):
    return np.array([value], float)


def test_transfers_across_changes_and_pauses_take_hand_sized_times():
    links = compute_links(STEPPED)
    for start, size, end in [(0, 100, 1.0), (1, 100, 2.0), (1, 125, 3.5), (2.5, 50, 4.0)]:
        assert links.finish_time(array(start), array(size)).tolist() == [end]
    assert links.latest_start(array(3.5), array(125)).tolist() == [1.0]
    assert links.transferred(array(1.0), array(3.5)).tolist() == [125.0]
    assert links.transferred(array(3.5), array(1.0)).tolist() == [0.0]
    assert [links.rate(array(at))[0] for at in (1.9, 2.0, 3.0)] == [100.0, 0.0, 50.0]
    assert np.isinf(links.finish_time(array(3.0), array(301.0)))[0]  # 300 bytes by the ninth second
    assert links.hold().finish_time(array(1.0), array(200.0)).tolist() == [3.0]


@pytest.mark.parametrize("rate", [1e6 / 3, 7.0])
def test_a_constant_trace_is_the_constant_number_bit_for_bit(rate):
    plain, traced = compute_links(rate, 3), compute_links(ConstantTrace(rate), 3)
    assert plain.constant.tolist() == traced.constant.tolist()
    assert plain.rates is None
    assert traced.rates is None
    for start, size in product((0.0, 0.1, 2.3), (0.0, 1.0, 12345.0)):
        starts, sizes = np.full(3, start), np.full(3, size)
        for name in ("finish_time", "latest_start"):
            values = [getattr(links, name)(starts, sizes).tolist() for links in (plain, traced)]
            assert values[0] == values[1] == values[0]
        assert plain.finish_time(starts, sizes).tolist() == [start + size / rate] * 3


def test_links_without_a_limit_and_links_that_change_may_be_mixed():
    classes = (DeviceClass(up=STEPPED), DeviceClass(), DeviceClass(up=50.0))
    fleet = Fleet(size=300, classes=classes)
    devices = np.arange(60)
    links = fleet.compute_links(devices, "up", 0.0, 9.0)
    ends = links.finish_time(np.ones(60), np.full(60, 125.0))
    assert ends.tolist() == [(3.5, 1.0, 3.5)[c] for c in fleet.get_class_indices(devices)]


def test_a_dead_link_carries_nothing():
    links = compute_links(ConstantTrace(0.0))
    assert np.isinf(links.finish_time(array(0.0), array(1.0)))[0]
    assert np.isinf(links.hold().finish_time(array(0.0), array(1.0)))[0]
    assert links.finish_time(array(2.0), array(0.0)).tolist() == [2.0]


def test_speeds_uploads_and_downloads_change_at_times_of_their_own():
    trace = ChangingTrace(low=1.0, high=2.0, per_round=3.0)
    fleet = Fleet(size=9, speed=trace, classes=(DeviceClass(up=trace, down=trace),))
    devices = np.arange(9)
    up, down = (fleet.compute_links(devices, way, 0.0, 5.0).rates for way in ("up", "down"))
    totals = [fleet.compute_speeds(devices, 0.0, 5.0).total, up.total, down.total]
    assert len({*np.concatenate(totals).tolist()}) == 27


def test_links_replay_recordings_in_every_format(tmp_path):
    csv, lines, on_off = (tmp_path / name for name in ("a.csv", "a.jsonl", "a.json"))
    csv.write_text("device,seconds,speed\na,0,100\na,2,50\nb,0,10\n")
    lines.write_text('{"seconds": 0, "speed": 100}\n{"seconds": 2, "speed": 50}\n')
    on_off.write_text('[{"active": [1], "inactive": [3], "finish_time": 4}]')
    recorded = compute_links(RecordedTrace(str(csv)), 3)
    assert recorded.finish_time(np.ones(3), np.full(3, 150.0)).tolist()[::2] == [3.0, 3.0]
    assert recorded.rate(np.ones(3)).tolist() == [100.0, 10.0, 100.0]
    assert compute_links(RecordedTrace(str(lines))).rate(array(2.0)).tolist() == [50.0]
    available = ProductTrace((ConstantTrace(100.0), RecordedAvailability(str(on_off))))
    # on from 1 to 3 and from 5 to 7
    assert compute_links(available).finish_time(array(0.0), array(300.0)).tolist() == [6.0]


def test_a_missing_recording_of_a_link_is_found_before_the_run(tmp_path):
    link = RecordedTrace(str(tmp_path / "none.csv"))
    fleet = Fleet(size=2, classes=(DeviceClass(down=link),))
    with pytest.raises(ValueError, match=r"none\.csv: expected a readable recording"):
        fleet.check_traces()


def test_a_window_opens_the_link_at_the_time_of_the_run():
    night = ProductTrace((ConstantTrace(10.0), OnOffWindows(windows=((2.0, 4.0),), period=8.0)))
    links = compute_links(night, start=8.0)
    assert links.finish_time(array(0.0), array(10.0)).tolist() == [3.0]
