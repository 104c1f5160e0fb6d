"""A refused device process is reported once."""

from types import SimpleNamespace

import pytest

from pliant.deploy.device.host import Limits
from pliant.deploy.supervise import split_node
from pliant.deploy.supervise.split_node import SplitNodeSupervisor

REASON = "127.0.0.1:9092 refuses: device 2: expected a registered key"


class RefusedProcess:
    """A process that ended with a line in its log."""

    is_alive, process = False, SimpleNamespace(returncode=3, pid=0)

    def __init__(self, command, log, env):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"WARNING pliant: an earlier warning\n{REASON}\n")

    def read_log_tail(self, count):
        return REASON

    def stop(self):
        pass


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setattr(split_node, "ChildProcess", RefusedProcess)
    return SplitNodeSupervisor(2, "127.0.0.1:9092", tmp_path, Limits())


def test_watch_raises_the_refusal_without_logging_it(device, caplog):
    with device, pytest.raises(PermissionError) as raised:
        device.watch()
    assert str(raised.value) == REASON
    assert caplog.messages == ["an earlier warning"]


def test_restart_dead_logs_the_refusal_once(device, caplog):
    with device:
        for _ in range(3):
            device.restart_dead()
    assert caplog.messages == ["an earlier warning", f"device 2 ended: {REASON}"]
