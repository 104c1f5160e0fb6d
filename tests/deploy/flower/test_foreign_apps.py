"""Foreign Flower apps: no device runs one (`supervise/test_federation.py`: nor does a server)."""

from contextlib import contextmanager

import pytest
from tests.deploy.flower.foreign_app import start_foreign_app
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import wait_until

from pliant.deploy.device.host import Limits
from pliant.deploy.supervise.child_process import ChildProcess, make_process_env, run_supervisor
from pliant.deploy.supervise.node import DeviceSupervisor

pytestmark = pytest.mark.waits


@contextmanager
def run_flower_server(folder, port):
    """Run Flower's own SuperLink, as a malicious server may."""
    command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "superlink.log"
    process = ChildProcess(command, log, make_process_env(folder / "flower"))
    try:
        wait_until(lambda: "Uvicorn running" in log.read_text(), "SuperLink to listen")
        yield
    finally:
        process.stop()


def test_a_device_runs_no_app_of_a_malicious_server(tmp_path):
    port = find_free_port()
    with run_flower_server(tmp_path, port):
        device = DeviceSupervisor(
            "federated", 0, f"127.0.0.1:{port}", tmp_path / "device", Limits()
        )
        with run_supervisor(device):
            result = start_foreign_app(tmp_path, f"127.0.0.1:{port}", "insecure = true")
            assert result.returncode == 0, result.stdout + result.stderr
            wait_until((tmp_path / "answer").exists, "the device's answer")
    assert not (tmp_path / "ran-on-device").exists()
    assert "expected pliant's app" in (tmp_path / "answer").read_text()
