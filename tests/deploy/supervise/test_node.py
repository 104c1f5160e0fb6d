"""The supervisor of a device without its processes: its messages about refused devices."""

import logging
import subprocess
import sys

import pytest

from pliant.deploy.device.host import Limits
from pliant.deploy.settings import EXIT_REFUSED, EXIT_REPORTED
from pliant.deploy.supervise import node, supervisor
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.node import DeviceSupervisor

REASON = "127.0.0.1:9092 refuses: device 2: expected a registered key"


class FakeProcess:
    """A worker that runs, or a process that has ended with lines in its log."""

    pid = 0

    def __init__(self, log, lines, exit_code):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(lines)
        self.exit_code, self.is_alive = exit_code, exit_code is None

    def stop(self):
        pass


def start_fakes(monkeypatch, lines, exit_code):
    """Replace all processes; only that of a worker beside a node runs."""

    def start(command, log, env):
        is_idle = "device.worker" in " ".join(command)
        return FakeProcess(log, lines, None if is_idle else exit_code)

    monkeypatch.setattr(node, "ChildProcess", start)
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.0)


@pytest.fixture
def device(tmp_path):
    with_flower = DeviceSupervisor("federated", 3, "127.0.0.1:9092", tmp_path / "state", Limits())
    yield with_flower
    with_flower.close()


def test_a_refused_device_ends_with_the_reason(device, monkeypatch):
    start_fakes(monkeypatch, f"{REASON}\n", EXIT_REFUSED)
    device.start()
    with pytest.raises(PermissionError, match="expected a registered key"):
        device.watch()


@pytest.mark.parametrize("exit_code", [1, EXIT_REPORTED, -9])
@pytest.mark.parametrize("kind", ["federated", "split"])
def test_no_other_end_is_a_refusal(tmp_path, monkeypatch, kind, exit_code):
    start_fakes(monkeypatch, "OSError: No space left on device\n", exit_code)
    monkeypatch.setattr(supervisor, "MAX_DELAY", 0.0)
    device = DeviceSupervisor(kind, 3, "127.0.0.1:9092", tmp_path, Limits())
    with run_supervisor(device), pytest.raises(ChildProcessError) as raised:
        device.watch()
    assert "died 10 times without progress" in str(raised.value)
    assert str(raised.value).endswith("OSError: No space left on device")


def test_a_node_that_died_for_another_reason_is_restarted(device, monkeypatch, caplog):
    start_fakes(monkeypatch, "Killed", -9)
    device.start()
    with caplog.at_level(logging.WARNING):
        device.restart_dead()
    assert "device 3: supernode died; restarting it" in caplog.text


def test_a_worker_that_exited_while_idle_is_restarted_when_it_is_wanted(device, monkeypatch):
    start_fakes(monkeypatch, "", None)
    device.start()
    worker = device.services[1].process
    worker.exit_code, worker.is_alive = 0, False
    device.restart_dead()
    assert set(device.pids) == {"supernode"}
    with open(device.services[1].heartbeat.with_name("worker.wanted"), "w"):
        device.restart_dead()
    while "worker" not in device.pids:
        device.restart_dead()


def test_two_devices_do_not_share_a_folder(device, monkeypatch, tmp_path):
    start_fakes(monkeypatch, "", -9)
    device.start()
    other = DeviceSupervisor("federated", 4, "127.0.0.1:9092", tmp_path / "state", Limits())
    with pytest.raises(BlockingIOError, match="in use by process"):
        other.start()
    other.close()


@pytest.fixture
def split_device(tmp_path, monkeypatch):
    start_fakes(monkeypatch, f"WARNING pliant: an earlier warning\n{REASON}\n", EXIT_REFUSED)
    return DeviceSupervisor("split", 2, "127.0.0.1:9092", tmp_path, Limits())


def test_watch_raises_the_refusal_without_logging_it(split_device, caplog):
    with run_supervisor(split_device), pytest.raises(PermissionError) as raised:
        split_device.watch()
    assert str(raised.value) == REASON
    assert caplog.messages == ["an earlier warning"]


def test_restart_dead_logs_the_refusal_once(split_device, caplog):
    with run_supervisor(split_device):
        for _ in range(3):
            split_device.restart_dead()
    assert caplog.messages == ["an earlier warning", f"device 2 ended: {REASON}"]


@pytest.mark.parametrize("module", ["supervise.node", "grpc.node"])
def test_what_runs_on_an_idle_device_imports_neither_torch_nor_flower(module):
    code = f"import sys, pliant.deploy.{module}; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"torch", "flwr"} & {*imported}
