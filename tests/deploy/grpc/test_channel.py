"""The law of the channel: whatever breaks, each request is executed once, in order."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.deploy.device.host import Limits
from pliant.deploy.grpc.channel import (
    MAX_PENDING_REQUESTS,
    MAX_UNEXPECTED_REPLIES,
    DeviceChannel,
)
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.frames import (
    DeviceHeader,
    KeptPart,
    Ready,
    ServerHeader,
    SplitReply,
    SplitRequest,
    SplitRunConfig,
    bytes_to_tensor,
    tensor_to_bytes,
)
from pliant.deploy.messages import MalformedMessage, decode_message, encode_message
from pliant.split.client import BatchRequest
from pliant.split.payload import Message


class RecordingClient:
    """A client that records each completed mini-batch; its messages carry their number."""

    def __init__(self):
        self.steps, self.open_step = [], None

    def request_batch(self, request):
        assert self.open_step is None
        self.open_step = request.step

    def forward(self):
        return Message((len(self.steps),), b"x" * self.open_step, b"")

    def backward(self, gradient):
        self.steps.append(self.open_step if gradient is None else -self.open_step)
        self.open_step = None

    def load_state_dict(self, state):
        self.steps = state["steps"].tolist()

    def state_dict(self):
        return {"steps": torch.tensor(self.steps, dtype=torch.int64)}


class RecordingDevice(SplitDevice):
    def _build_client(self, encoded_experiment):
        client = RecordingClient()
        self._initial_state = client.state_dict()
        return client


class Connection:
    """Both ends of a channel and the frames between them, moved one at a time."""

    def __init__(self, folder):
        self.folder, self.channel = folder, DeviceChannel(0, timeout=1e9)
        self.down, self.up, self.stream_id, self.epoch = [], [], 0, None
        self.kill()
        for _ in range(3):
            self.move()
        assert self.channel.join_round()
        self.channel.send_request("restore", kept=KeptPart(0))

    def kill(self):
        self.device = RecordingDevice(0, self.folder, Limits())
        self.cut()

    def cut(self):
        self.channel.detach(self.stream_id)
        self.down, self.up, self.epoch = [], [], None
        self.stream_id = self.channel.attach()

    def move(self, steps="dau"):
        """Move a frame down, let the device act on one, move one up."""
        if "d" in steps:
            frame, self.epoch = self.channel.get_next_frame(self.stream_id, self.epoch, timeout=0.0)
            self.down += [frame] if frame else []
        if "a" in steps and self.down:
            header, tensors = decode_message(self.down.pop(0), ServerHeader)
            if isinstance(header, SplitRunConfig):
                self.up += self.device.configure(header)
            else:
                frame = self.device.handle_request(header, tensors)
                self.up += [frame] if frame else []
        if "u" in steps and self.up:
            header, tensors = decode_message(self.up.pop(0), DeviceHeader)
            if isinstance(header, Ready):
                self.channel.mark_ready(self.stream_id, header.epoch, header.done_up_to)
            else:
                self.channel.receive_reply(self.stream_id, header, tensors)

    def drain(self):
        for _ in range(4 * MAX_PENDING_REQUESTS):
            self.move()


KINDS = ["exchange", "local", "d", "a", "u", "dau", "dau", "dau", "cut", "kill"]
EVENTS = st.lists(st.sampled_from(KINDS), min_size=10, max_size=60)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_whatever_breaks_each_mini_batch_is_done_once(events):
    with tempfile.TemporaryDirectory() as folder:
        connection, step, messages = Connection(Path(folder)), 0, []
        channel = connection.channel
        for event in events:
            if event in ("exchange", "local"):
                if len(channel._pending_requests) > MAX_PENDING_REQUESTS - 2:
                    connection.drain()
                step += 1
                is_exchange = event == "exchange"
                batch = BatchRequest(0, step, 0.1, needs_activation=is_exchange)
                number = channel.send_request("ask", batch=batch, needs_reply=is_exchange)
                tensors = {"slope": bytes_to_tensor(b"s")} if is_exchange else None
                channel.send_request("learn", tensors=tensors)
                messages += [(number, step)] if is_exchange else []
            elif event in ("cut", "kill"):
                getattr(connection, event)()
            else:
                connection.move(event)
        connection.drain()
        assert channel.wait_for_all_replies()
        steps_done = [abs(done) for done in connection.device._client.steps]
        assert steps_done == list(range(1, step + 1))
        for number, message_step in messages:
            reply, tensors = channel.wait_for_reply(number)
            assert reply.shape == (message_step - 1,)  # the mini-batches done before
            assert len(tensor_to_bytes(tensors["body"])) == message_step


def test_pending_requests_are_limited_and_a_silent_device_leaves(tmp_path):
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    channel = DeviceChannel(0, timeout=5.0, clock=clock)
    stream_id = channel.attach()
    epoch = channel.epoch
    _, announced_epoch = channel.get_next_frame(stream_id, None, timeout=0.0)
    channel.mark_ready(stream_id, epoch, 0)
    assert channel.join_round()
    numbers = [channel.send_request("drop") for _ in range(MAX_PENDING_REQUESTS)]
    assert numbers == list(range(1, MAX_PENDING_REQUESTS + 1))
    channel._condition.wait = lambda seconds: None  # the clock advances by itself
    assert channel.send_request("drop") is None  # no reply came: the device has left
    assert not channel.is_in_round
    frame, announced_epoch = channel.get_next_frame(stream_id, announced_epoch, timeout=0.0)
    assert decode_message(frame, ServerHeader)[0].epoch == announced_epoch == channel.epoch != epoch
    channel.receive_reply(stream_id, SplitReply(1, 1), {})  # of the old epoch
    channel.mark_ready(stream_id, epoch, 3)
    assert not channel.join_round()
    channel.mark_ready(stream_id, channel.epoch, 0)
    assert channel.join_round()


def test_a_device_that_lost_its_file_starts_a_new_epoch(tmp_path):
    connection = Connection(tmp_path)
    channel = connection.channel
    connection.drain()
    channel.send_request("ask", batch=BatchRequest(0, 1, 0.1, needs_activation=False))
    channel.send_request("learn")
    connection.drain()
    epoch = channel.epoch
    (tmp_path / "split.ckpt").unlink()  # as after a power loss
    connection.kill()
    connection.drain()
    assert channel.epoch != epoch
    assert not channel.is_in_round
    assert channel.join_round()


def test_a_flood_of_replies_is_cut_off(tmp_path):
    connection = Connection(tmp_path)
    connection.drain()
    for _ in range(MAX_UNEXPECTED_REPLIES):
        connection.channel.receive_reply(connection.stream_id, SplitReply(1, 1), {})
    with pytest.raises(MalformedMessage, match="replies to requests"):
        connection.channel.receive_reply(connection.stream_id, SplitReply(999, 999), {})


def test_a_device_refuses_a_gap(tmp_path):
    connection = Connection(tmp_path)
    connection.drain()
    with pytest.raises(MalformedMessage, match="request 2, got 4"):
        connection.device.handle_request(SplitRequest(4, "drop"), {})


def test_a_truncated_frame_is_refused():
    frame = encode_message(SplitReply(3, 2, 0.5, (1,)), {"body": torch.ones(2)})
    header = encode_message(SplitReply(3, 2, 0.5, (1,)))  # a valid frame without tensors
    for size in set(range(len(frame))) - {len(header)}:
        with pytest.raises(MalformedMessage):
            decode_message(frame[:size], DeviceHeader)
