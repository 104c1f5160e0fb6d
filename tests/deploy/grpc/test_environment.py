"""The ledger of a round on real devices, by hand: a device that leaves has used its time, too."""

from types import SimpleNamespace

import numpy as np
import pytest

from pliant.deploy.grpc.channel import DeviceChannel
from pliant.deploy.grpc.environment import WallClockEnvironment
from pliant.deploy.grpc.frames import SplitReply
from pliant.devices import Fleet
from pliant.split.client import BatchRequest


@pytest.mark.parametrize("leaves", [False, True])
def test_seconds_include_all_mini_batches_even_of_a_device_that_leaves(leaves):
    now = [0.0]
    channel = DeviceChannel(0, 5.0, clock=lambda: now[0])
    stream_id = channel.attach()
    channel.mark_ready(stream_id, channel.epoch, 0)
    channel.join_round()
    remote = SimpleNamespace(channel=channel, report_problems=lambda costs: None)
    fleet = Fleet(size=1, round_seconds=30.0)
    environment = WallClockEnvironment(
        fleet, np.array([1e9]), {0: remote}, seed=0, selected=[0], clock=lambda: now[0]
    )
    assert environment.available_clients() == [0]
    for step in range(3):
        environment.compute(0, 1e6, samples=16)
        number = channel.send_request("ask", batch=BatchRequest(0, step, 0.1))
        channel.receive_reply(stream_id, SplitReply(number, number), {})
        environment.compute(0, 2e6, samples=0)
        number = channel.send_request("learn")
        now[0] += 2.0
        channel.receive_reply(stream_id, SplitReply(number, number, seconds=2.0), {})
    if leaves:
        channel.leave_round()
    now[0] += 5.0
    [task] = environment.build_records(0)
    assert task.outcome == ("partial" if leaves else "finished")
    assert (task.seconds, task.exchange.waited) == (6.0, 5.0)
    channel.join_round()
    assert channel.batch_seconds == []  # the next round starts from zero


def test_no_mini_batch_starts_after_the_deadline_and_no_reply_is_waited_for(monkeypatch):
    """Each reply comes just in time, so only the deadline of the round ends it."""
    now = [0.0]
    channel = DeviceChannel(0, 20.0, clock=lambda: now[0])
    stream_id = channel.attach()
    channel.mark_ready(stream_id, channel.epoch, 0)
    channel.join_round()
    remote = SimpleNamespace(channel=channel, report_problems=lambda costs: None)
    environment = WallClockEnvironment(
        Fleet(size=1, round_seconds=3.0),
        np.array([1e9]),
        {0: remote},
        seed=0,
        selected=[0],
        clock=lambda: now[0],
        deadline=3.0,
    )
    assert environment.available_clients() == [0]
    for step in range(2):
        assert environment.compute(0, 1e6, samples=16)
        number = channel.send_request("ask", batch=BatchRequest(0, step, 0.1))
        now[0] += 2.0
        channel.receive_reply(stream_id, SplitReply(number, number), {})
    assert not environment.compute(0, 1e6, samples=16)
    assert environment.available_clients() == [0]  # its part is still fetched
    number = channel.send_request("params", needs_reply=True)

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(channel._condition, "wait", wait)
    assert channel.wait_for_reply(number) is None
    assert now[0] == pytest.approx(3.0 + 20.0)  # not 24, twenty after its last reply
    [task] = environment.build_records(0)
    assert task.outcome == "partial"
