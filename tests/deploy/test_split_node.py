"""A device's process that is refused: told once, by whoever watches it."""

from types import SimpleNamespace

import pytest

from pliant.deploy import split_node
from pliant.deploy.host import Limits
from pliant.deploy.split_node import SplitRemoteDevice

WHY = "127.0.0.1:9092 refuses: device 2: expected a registered key"


class Refused:
    """A process that has ended with a line in its log."""

    is_alive, process = False, SimpleNamespace(returncode=3, pid=0)

    def __init__(self, command, log, env):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"WARNING pliant: it was cold\n{WHY}\n")

    def last_words(self, count):
        return WHY

    def end(self):
        pass


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setattr(split_node, "Child", Refused)
    return SplitRemoteDevice(2, "127.0.0.1:9092", tmp_path, Limits())


def test_who_watches_is_told_by_the_error_alone(device, caplog):
    with device, pytest.raises(PermissionError) as told:
        device.watch()
    assert str(told.value) == WHY
    assert caplog.messages == ["it was cold"]  # what it has said before, and nothing twice


def test_who_mends_is_told_by_one_line_of_the_log(device, caplog):
    with device:
        for _ in range(3):
            device.mend()
    assert caplog.messages == ["it was cold", f"device 2 has ended: {WHY}"]
