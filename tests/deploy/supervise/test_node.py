"""The supervisor of a device without Flower: its messages about a refused node."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pliant.deploy.device.host import Limits
from pliant.deploy.supervise import node
from pliant.deploy.supervise.node import FlowerDeviceSupervisor


class DeadChild:
    """A node that ends at once."""

    is_alive, process = False, SimpleNamespace(returncode=1)

    def __init__(self, log):
        self.log = log

    def read_log_tail(self, count):
        return self.log

    def stop(self):
        pass


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "RESTART_SECONDS", 0.0)
    supervisor = FlowerDeviceSupervisor(3, "127.0.0.1:9092", tmp_path / "state", Limits())
    monkeypatch.setattr(supervisor, "_start_worker", lambda: None)
    yield supervisor
    supervisor.close()


def start_with_dead_node(device, monkeypatch, log):
    def start():
        device._children["supernode"] = DeadChild(log)

    monkeypatch.setattr(device, "_start_node", start)
    device.start()


def test_a_refused_device_warns_once_and_ends(device, monkeypatch, caplog):
    monkeypatch.setattr(node, "ADMISSION_SECONDS", 0.5)
    start_with_dead_node(
        device, monkeypatch, "[code: 2004] Failed to activate SuperNode.\nfor more"
    )
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(PermissionError, match="device 3: expected a r"),
    ):
        device.watch()
    assert [record.message for record in caplog.records] == [
        f"device 3: {node.REFUSED_MESSAGE}; retrying"
    ]


def test_a_node_that_died_for_another_reason_is_restarted(device, monkeypatch, caplog):
    start_with_dead_node(device, monkeypatch, "Killed")
    with caplog.at_level(logging.WARNING):
        device.restart_dead()
    assert "device 3: supernode died; restarting it" in caplog.text


def test_two_devices_do_not_share_a_folder(device, monkeypatch, tmp_path):
    start_with_dead_node(device, monkeypatch, "")
    other = FlowerDeviceSupervisor(4, "127.0.0.1:9092", tmp_path / "state", Limits())
    with pytest.raises(BlockingIOError, match="in use by process"):
        other.start()
    other.close()


def test_a_supervisor_does_not_import_torch():
    code = "import sys, pliant.deploy.supervise.node; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
