"""The server's side of Flower with a grid of our own that hangs, as Flower's does for minutes."""

import threading
import time
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Stuck:
    """A grid whose first look for answers never ends."""

    def __init__(self):
        self.looks = 0

    def get_nodes(self):
        return [SimpleNamespace(node_id=5, name="0"), SimpleNamespace(node_id=6, name="1")]

    def push_messages(self, messages):
        return [f"message {number}" for number, _ in enumerate(messages)]

    def pull_messages(self, identities):
        self.looks += 1
        if self.looks == 1:
            threading.Event().wait(60)
        return []


def test_an_answer_that_never_ends_does_not_hold_a_round_up(monkeypatch):
    from pliant.deploy import link as link_module

    monkeypatch.setattr(link_module, "PULL_SECONDS", 0.05)
    monkeypatch.setattr(link_module.FlowerLink, "messages", lambda self, letters, **_: letters)
    grid = Stuck()
    link = link_module.FlowerLink(grid, b"")
    link.send({0: b"order"}, round=0, seconds=1.0)
    began = time.monotonic()
    assert link.replies() == link.replies() == []
    assert time.monotonic() - began < 5.0
    assert grid.looks == 1  # the same look, still under way
    link.send({0: b"order"}, round=1, seconds=1.0)
    assert link.replies() == []
    assert grid.looks == 2  # the next round looks anew


def test_a_greeting_that_never_ends_does_not_hide_the_devices_that_are_there(monkeypatch):
    from pliant.deploy import link as link_module

    monkeypatch.setattr(link_module, "PULL_SECONDS", 0.05)
    monkeypatch.setattr(link_module.FlowerLink, "_message", lambda self, *given: given)
    link = link_module.FlowerLink(Stuck(), b"")
    began = time.monotonic()
    assert link.online() == {0, 1}
    assert time.monotonic() - began < 5.0
