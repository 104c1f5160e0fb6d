"""The owner's limits on a split device: a share of a core, and half of it when hot."""

import pytest

from pliant.deploy.device.host import HostStatus, Limits
from pliant.deploy.grpc import device as device_module
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.frames import SplitRequest
from pliant.split.client import BatchRequest


class TwoSecondClient:
    """A client whose mini-batch takes two seconds, one each way."""

    def __init__(self, now):
        self._now = now

    def request_batch(self, request):
        self._now[0] += 1.0

    def backward(self, gradient):
        self._now[0] += 1.0

    def state_dict(self):
        return {}


@pytest.mark.parametrize(("share", "rests"), [(1.0, (0.0, 2.0)), (0.5, (2.0, 6.0))])
def test_a_hot_machine_gets_half_the_share(share, rests, tmp_path, monkeypatch):
    host_is_hot = [False]
    monkeypatch.setattr(
        device_module, "read_host", lambda: HostStatus(1.0, 0.0, None, host_is_hot[0])
    )
    now, sleeps = [0.0], []
    limits, clock = Limits(cpu_share=share), lambda: now[0]
    device = SplitDevice(0, tmp_path, limits, clock=clock, sleep=sleeps.append)
    device._client = TwoSecondClient(now)
    for round_number, is_hot in enumerate([False, True]):
        host_is_hot[0] = is_hot
        batch = BatchRequest(round_number, 0, 0.1, needs_activation=False)
        device.handle_request(SplitRequest(2 * round_number + 1, "ask", batch=batch), {})
        device.handle_request(SplitRequest(2 * round_number + 2, "learn"), {})
        assert sum(sleeps) == rests[round_number]
        sleeps.clear()
