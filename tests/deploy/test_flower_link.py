"""The server's side of Flower with a grid of our own that hangs, as Flower's does for minutes."""

import threading
import time
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def answered(identity, reason=None):
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identity),
        has_error=lambda: reason is not None,
        error=SimpleNamespace(reason=reason),
        content={"body": {"body": SimpleNamespace(data=identity.encode())}},
    )


class Stuck:
    """A grid whose first look has got hold of the answer to message 0, but not of all its parts.

    Like Flower's, it says in the meantime that there is no such message.
    """

    def __init__(self):
        self.looks = 0
        self.rest = threading.Event()

    def get_nodes(self):
        return [SimpleNamespace(node_id=5, name="0"), SimpleNamespace(node_id=6, name="1")]

    def push_messages(self, messages):
        return [f"message {number}" for number, _ in enumerate(messages)]

    def pull_messages(self, identities):
        self.looks += 1
        if self.looks == 1:
            self.rest.wait(60)
            return [answered("message 0")]
        found = [answered("message 0", "unavailable")] if "message 0" in identities else []
        return found + [answered(name) for name in identities if name != "message 0"]


@pytest.fixture
def module(monkeypatch):
    from pliant.deploy import link, looks

    monkeypatch.setattr(looks, "SECONDS", 0.05)
    monkeypatch.setattr(link.FlowerLink, "_message", lambda self, *given: given)
    monkeypatch.setattr(link.FlowerLink, "messages", lambda self, letters, **_: letters)
    return link


def test_an_answer_that_never_ends_holds_up_neither_the_round_nor_other_answers(module):
    grid = Stuck()
    link = module.FlowerLink(grid, b"")
    link.send({7: b"order", 8: b"order"}, round=0, seconds=1.0)
    began = time.monotonic()
    assert link.replies() == []
    assert link.replies() == [module.Reply(8, b"message 1")]
    assert link.replies() == link.replies() == []  # not that device 7 has no answer
    assert time.monotonic() - began < 5.0
    link.send({7: b"order"}, round=1, seconds=1.0)
    assert link.replies() == [module.Reply(7, None, "unavailable")]  # nobody fetches it now


def test_an_answer_that_takes_its_time_arrives_all_the_same(module):
    grid = Stuck()
    link = module.FlowerLink(grid, b"")
    link.send({7: b"order", 8: b"order"}, round=0, seconds=1.0)
    assert link.replies() == []
    assert link.replies() == [module.Reply(8, b"message 1")]
    grid.rest.set()
    end = time.monotonic() + 5.0
    while not (found := link.replies()) and time.monotonic() < end:
        pass
    assert found == [module.Reply(7, b"message 0")]


def test_looks_that_are_stuck_do_not_pile_up(module, monkeypatch):
    from pliant.deploy.looks import MOST, Looks

    grid = Stuck()
    monkeypatch.setattr(Stuck, "pull_messages", lambda self, names: self.rest.wait(60) and [])
    before, looks = threading.active_count(), Looks(grid)
    for _ in range(2 * MOST):
        assert looks.messages(["message 0"]) == []
    assert threading.active_count() - before == MOST
    grid.rest.set()


def test_a_greeting_that_never_ends_does_not_hide_the_devices_that_are_there(module):
    link = module.FlowerLink(Stuck(), b"")
    began = time.monotonic()
    assert link.online() == {0, 1}
    assert time.monotonic() - began < 5.0


def test_a_greeting_of_another_form_does_not_end_the_run(module, monkeypatch):
    def odd(self, names):
        return [SimpleNamespace(**answered(name).__dict__ | {"content": {}}) for name in names]

    monkeypatch.setattr(Stuck, "pull_messages", odd)
    link = module.FlowerLink(Stuck(), b"")
    assert link.online() == {0, 1}  # by their keys
    assert link.greetings == {}


def test_a_message_that_flower_cannot_read_costs_its_sender_only(module, monkeypatch):
    claimed, asked = set(), []

    def pull(self, names):
        asked.append(list(names))
        fresh = [name for name in names if name not in claimed]
        claimed.update(names)  # Flower hands a message out once
        if "message 0" in fresh:
            raise ValueError("it cannot be inflated")
        gone = [answered(name, "unavailable") for name in names if name not in fresh]
        return gone + [answered(name) for name in fresh]

    monkeypatch.setattr(Stuck, "pull_messages", pull)
    link = module.FlowerLink(Stuck(), b"")
    for round in range(2):
        link.send({7: b"order", 8: b"order"}, round=round, seconds=1.0)
        found = {reply.device: reply for reply in link.replies()}
        if round == 0:  # its neighbour's answer was fetched with it
            assert {reply.raw for reply in found.values()} == {None}
        else:  # from now on each is asked for alone
            assert found == {7: module.Reply(7, b"", "KeyError"), 8: module.Reply(8, b"message 1")}
        claimed.clear()
    assert asked[0] == ["message 0", "message 1"]
    assert all(len(names) == 1 for names in asked[1:])


def test_a_broken_connection_is_not_taken_for_a_message(module, monkeypatch):
    def pull(self, names):
        raise ConnectionResetError

    monkeypatch.setattr(Stuck, "pull_messages", pull)
    link = module.FlowerLink(Stuck(), b"")
    link.send({7: b"order"}, round=0, seconds=1.0)
    with pytest.raises(ConnectionResetError):
        link.replies()
