"""A device's supervisor, without Flower: what it says of a node that was turned away."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pliant.deploy import remote
from pliant.deploy.host import Limits
from pliant.deploy.remote import RemoteDevice


class Gone:
    """A node that ends at once."""

    is_alive, process = False, SimpleNamespace(returncode=1)

    def __init__(self, words):
        self.words = words

    def last_words(self, count):
        return self.words

    def end(self):
        pass


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "AGAIN", 0.0)
    made = RemoteDevice(3, "127.0.0.1:9092", tmp_path / "state", Limits())
    monkeypatch.setattr(made, "_work", lambda: None)
    yield made
    made.close()


def nodes(device, monkeypatch, words):
    def start():
        device._children["supernode"] = Gone(words)

    monkeypatch.setattr(device, "_node", start)
    device.start()


def test_a_device_that_is_not_let_in_says_so_once_and_ends(device, monkeypatch, caplog):
    monkeypatch.setattr(remote, "PATIENCE", 0.5)
    nodes(device, monkeypatch, "[code: 2004] Failed to activate SuperNode.\nfor more")
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(PermissionError, match="device 3: expected a r"),
    ):
        device.watch()
    assert [record.message for record in caplog.records] == [
        f"device 3: {remote.REFUSED}; trying again"
    ]


def test_a_node_that_died_otherwise_is_started_again(device, monkeypatch, caplog):
    nodes(device, monkeypatch, "Killed")
    with caplog.at_level(logging.WARNING):
        device.mend()
    assert "device 3: supernode has died; starting it again" in caplog.text


def test_two_devices_do_not_share_a_folder(device, monkeypatch, tmp_path):
    nodes(device, monkeypatch, "")
    other = RemoteDevice(4, "127.0.0.1:9092", tmp_path / "state", Limits())
    with pytest.raises(BlockingIOError, match="expected no other process"):
        other.start()
    other.close()


def test_a_supervisor_is_small():
    code = "import sys, pliant.deploy.remote; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
