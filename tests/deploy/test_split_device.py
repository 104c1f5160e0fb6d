"""What a user allows a device of split learning: a share of a core, and half of it in the heat."""

import pytest

from pliant.deploy import split_device
from pliant.deploy.host import Hints, Limits
from pliant.deploy.split_device import SplitDevice
from pliant.deploy.split_frames import Question
from pliant.split.client import Turn


class Second:
    """A client whose mini-batch takes two seconds, one each way."""

    def __init__(self, now):
        self._now = now

    def ask(self, turn):
        self._now[0] += 1.0

    def learn(self, slope):
        self._now[0] += 1.0

    def state(self):
        return {}


@pytest.mark.parametrize(("share", "rests"), [(1.0, (0.0, 2.0)), (0.5, (2.0, 6.0))])
def test_a_hot_machine_rests_for_twice_the_time(share, rests, tmp_path, monkeypatch):
    heat = [False]
    monkeypatch.setattr(split_device, "hints", lambda: Hints(1.0, 0.0, None, None, heat[0]))
    now, slept = [0.0], []
    limits, clock = Limits(cpu_share=share), lambda: now[0]
    device = SplitDevice(0, tmp_path, limits, clock=clock, sleep=slept.append)
    device._client = Second(now)
    for number, is_hot in enumerate([False, True]):  # round by round
        heat[0] = is_hot
        device.answered(Question(2 * number + 1, "ask", turn=Turn(number, 0, 0.1, talks=False)), {})
        device.answered(Question(2 * number + 2, "learn"), {})
        assert sum(slept) == rests[number]
        slept.clear()
