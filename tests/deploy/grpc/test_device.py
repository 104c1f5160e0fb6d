"""A split device: its owner's limits, a share of a core, half of it when hot, and a full disk."""

import errno
import threading

import pytest
from tests.deploy.grpc_in_process import make_client, make_devices

from pliant.deploy.device.host import HostStatus, Limits
from pliant.deploy.grpc import client as client_module
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


def test_a_full_disk_does_not_end_a_device(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "DECLINED_RETRY_SECONDS", 0.0)
    [device] = make_devices([0], tmp_path).values()
    grpc_client, attempts = make_client(device, 1), []

    def run_stream():
        attempts.append(1)
        if len(attempts) == 3:
            grpc_client.stop()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(grpc_client, "_run_stream", run_stream)
    grpc_client.run()
    assert len(attempts) == 3
    assert "device 0 waits for disk space" in caplog.text
    monkeypatch.setattr(grpc_client, "_stop", threading.Event())
    monkeypatch.setattr(grpc_client, "_run_stream", lambda: (_ for _ in ()).throw(OSError("else")))
    with pytest.raises(OSError, match="else"):
        grpc_client.run()
