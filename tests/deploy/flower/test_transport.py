"""The Flower transport over a grid that hangs, as Flower's does for minutes."""

import threading
from itertools import count
from types import SimpleNamespace

import pytest
from tests.waiting import LIMIT, wait_until

from pliant.deploy.server.replies import RawReply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def make_reply(message_id, reason=None):
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=message_id),
        has_error=lambda: reason is not None,
        error=SimpleNamespace(reason=reason),
        content={"body": {"body": SimpleNamespace(data=message_id.encode())}},
    )


class HangingGrid:
    """A grid whose first pull waits for the rest of the reply to message 0.

    Meanwhile, like Flower's, it reports that there is no such reply.
    """

    def __init__(self):
        self.pulls = 0
        self.is_complete = threading.Event()
        self.has_waited = False

    def get_nodes(self):
        return [SimpleNamespace(node_id=5, name="0"), SimpleNamespace(node_id=6, name="1")]

    def push_messages(self, messages):
        return [f"message {number}" for number, _ in enumerate(messages)]

    def pull_messages(self, message_ids):
        self.pulls += 1
        if self.pulls == 1:
            self.is_complete.wait(LIMIT)
            self.has_waited = True
            return [make_reply("message 0")]
        return [
            make_reply(name, "unavailable" if name == "message 0" else None) for name in message_ids
        ]


@pytest.fixture
def make_transport(monkeypatch):
    from pliant.deploy.flower import transport as transport_module
    from pliant.deploy.flower.transport import FlowerTransport

    others = threading.enumerate()
    grids = []
    monkeypatch.setattr(transport_module, "PULL_SECONDS", 0.05)
    monkeypatch.setattr(FlowerTransport, "_make_message", lambda self, *fields: fields)
    monkeypatch.setattr(FlowerTransport, "make_messages", lambda self, requests, **_: requests)

    def make(grid):
        grids.append(grid)
        return FlowerTransport(grid, b"")

    yield make
    for grid in grids:
        grid.is_complete.set()
    for thread in set(threading.enumerate()).difference(others):
        thread.join(LIMIT)


def expect_replies(monkeypatch):
    """Wait for the pulls that follow, which do not hang."""
    from pliant.deploy.flower import transport as transport_module

    monkeypatch.setattr(transport_module, "PULL_SECONDS", LIMIT)


def test_an_unfinished_reply_holds_up_neither_the_round_nor_other_replies(
    make_transport, monkeypatch
):
    grid = HangingGrid()
    transport = make_transport(grid)
    transport.send({7: b"request", 8: b"request"}, round=0, seconds=1.0)
    assert transport.poll_replies() == []
    expect_replies(monkeypatch)
    assert transport.poll_replies() == [RawReply(8, b"message 1")]
    assert transport.poll_replies() == transport.poll_replies() == []  # no error for device 7
    assert not grid.has_waited
    transport.send({7: b"request"}, round=1, seconds=1.0)
    assert transport.poll_replies() == [RawReply(7, None, "unavailable")]  # no pull in progress


def test_a_slow_reply_arrives_later(make_transport, monkeypatch):
    grid = HangingGrid()
    transport = make_transport(grid)
    transport.send({7: b"request", 8: b"request"}, round=0, seconds=1.0)
    assert transport.poll_replies() == []
    expect_replies(monkeypatch)
    assert transport.poll_replies() == [RawReply(8, b"message 1")]
    grid.is_complete.set()
    replies = wait_until(transport.poll_replies, "the slow reply")
    assert replies == [RawReply(7, b"message 0")]


def test_hanging_pulls_do_not_pile_up(make_transport, monkeypatch):
    from pliant.deploy.flower.transport import MAX_PULLS, ReplyPoller

    grid = HangingGrid()
    make_transport(grid)
    monkeypatch.setattr(grid, "pull_messages", lambda names: grid.is_complete.wait(LIMIT) and [])
    threads, poller = threading.active_count(), ReplyPoller(grid)
    for _ in range(2 * MAX_PULLS):
        assert poller.poll(["message 0"]) == []
    assert threading.active_count() - threads == MAX_PULLS


def test_an_unfinished_hello_does_not_hide_online_devices(make_transport):
    grid = HangingGrid()
    transport = make_transport(grid)
    assert transport.find_online_devices() == {0, 1}
    assert not grid.has_waited


def test_a_malformed_hello_does_not_end_the_run(make_transport, monkeypatch):
    def pull(names):
        return [SimpleNamespace(**make_reply(name).__dict__ | {"content": {}}) for name in names]

    grid = HangingGrid()
    monkeypatch.setattr(grid, "pull_messages", pull)
    transport = make_transport(grid)
    assert transport.find_online_devices() == {0, 1}  # by their keys
    assert transport.hello_replies == {}


def test_an_unreadable_message_costs_only_its_sender(make_transport, monkeypatch):
    pulled, calls = set(), []

    def pull(names):
        calls.append(list(names))
        new = [name for name in names if name not in pulled]
        pulled.update(names)  # Flower delivers a message once
        if "message 0" in new:
            raise ValueError("it cannot be inflated")
        return [make_reply(name, None if name in new else "unavailable") for name in names]

    grid = HangingGrid()
    monkeypatch.setattr(grid, "pull_messages", pull)
    transport = make_transport(grid)
    for round in range(2):
        transport.send({7: b"request", 8: b"request"}, round=round, seconds=1.0)
        replies = {reply.device: reply for reply in transport.poll_replies()}
        if round == 0:  # the other reply was pulled together with it
            assert {reply.raw for reply in replies.values()} == {None}
        else:  # from now on, replies are pulled one at a time
            assert replies == {7: RawReply(7, b"", "KeyError"), 8: RawReply(8, b"message 1")}
        pulled.clear()
    assert calls[0] == ["message 0", "message 1"]
    assert all(len(names) == 1 for names in calls[1:])


def test_a_broken_connection_is_not_taken_for_an_unreadable_message(make_transport, monkeypatch):
    def pull(names):
        raise ConnectionResetError

    grid = HangingGrid()
    monkeypatch.setattr(grid, "pull_messages", pull)
    transport = make_transport(grid)
    transport.send({7: b"request"}, round=0, seconds=1.0)
    with pytest.raises(ConnectionResetError):
        transport.poll_replies()


class QuietGrid:
    """A grid whose nodes change and which delivers no replies."""

    def __init__(self):
        self.nodes = {5: "0", 6: "1"}
        self.numbers = count()
        self.is_complete = threading.Event()

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, name=name) for node, name in self.nodes.items()]

    def push_messages(self, messages):
        return [f"message {next(self.numbers)}" for _ in messages]

    def pull_messages(self, message_ids):
        return []


def test_a_device_that_is_gone_or_has_another_key_is_not_waited_for(make_transport):
    from pliant.deploy.flower.transport import GONE_SECONDS, LOOK_SECONDS

    now, grid = [0.0], QuietGrid()
    transport = make_transport(grid)
    transport._clock = lambda: now[0]
    transport.find_online_devices()
    transport.send({0: b"train"}, round=0, seconds=1e6)
    now[0] += 1000.0
    assert transport.poll_replies() == []  # it is slow, and online
    grid.nodes = {7: "0"}  # enrolled again
    now[0] += GONE_SECONDS - 1
    assert transport.poll_replies() == []
    now[0] += LOOK_SECONDS
    [reply] = transport.poll_replies()
    assert (reply.device, reply.raw, reply.reason) == (0, None, "it was offline for 60 s")
    assert transport.poll_replies() == []


def test_a_device_that_leaves_or_restarts_is_lost_with_its_request(make_transport):
    grid = QuietGrid()
    transport = make_transport(grid)
    assert transport.find_online_devices() == {0, 1}
    transport.send({0: b"a"}, round=0, seconds=9.0, adds=True)
    transport.send({1: b"b"}, round=1, seconds=9.0, adds=True)
    assert transport.find_lost_devices() == set()
    grid.nodes = {6: "1", 7: "0"}  # device 0 is back as another node
    transport.find_online_devices()
    assert transport.find_lost_devices() == {0}
    transport.send({0: b"a"}, round=2, seconds=9.0, adds=True)
    assert transport.find_lost_devices() == set()
    grid.nodes = {7: "0"}
    transport.find_online_devices()
    assert transport.find_lost_devices() == {1}
    transport.send({0: b"a"}, round=3, seconds=9.0)  # a new round waits for nobody else
    assert transport.find_lost_devices() == set()


def test_flower_stores_the_tensors_of_all_requests_once():
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from pliant.deploy.flower.client_app import extract_body, make_content

    tensors = bytes(range(256)) * 100
    contents = [make_content(head, tensors) for head in (b"device 0", b"device 1")]
    stored = {}
    for content in contents:
        stored |= {key: thing.deflate() for key, thing in get_all_nested_objects(content).items()}
    assert len(tensors) < sum(map(len, stored.values())) < 1.2 * len(tensors)
    bodies = [extract_body(SimpleNamespace(content=content)) for content in contents]
    assert bodies == [b"device 0" + tensors, b"device 1" + tensors]
