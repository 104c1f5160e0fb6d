"""Foreign Flower apps: nobody without the server's secret starts one, and no device runs one."""

import subprocess
from contextlib import contextmanager

import pytest
from tests.deploy.federation_keys import make_federation_keys
from tests.deploy.in_process import make_experiment
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import LIMIT, wait_until

from pliant.deploy.device.host import Limits
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import ChildProcess, make_process_env, run_supervisor
from pliant.deploy.supervise.federation import open_run
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.deploy.supervise.server import ServerSupervisor

pytestmark = pytest.mark.waits

PROJECT = """\
[project]
name = "foreign"
version = "1.0.0"
description = "Foreign code."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "stranger"

[tool.flwr.app.components]
serverapp = "foreign:server"
clientapp = "foreign:client"

[tool.flwr.app.config]
folder = ""
"""
CODE = """\
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    folder = Path(context.run_config["folder"])
    (folder / "ran-on-server").touch()
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    message = Message(RecordDict(), dst_node_id=nodes[0], message_type="train")
    (reply,) = grid.send_and_receive([message])
    (folder / "answer").write_text(str(reply.error.reason if reply.has_error() else "done"))

@client.train()
def train(message, context):
    (Path(context.run_config["folder"]) / "ran-on-device").touch()
    return Message(RecordDict(), reply_to=message)
"""


def start_foreign_app(folder, address, security):
    """Submit an app with `flwr run`, as any user of the machine can; return the result."""
    app, home = folder / "app", folder / "home"
    for path in (app, home):
        path.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "foreign.py").write_text(CODE)
    config = f'[superlink]\ndefault = "server"\n\n[superlink.server]\naddress = "{address}"\n'
    (home / "config.toml").write_text(config + security + "\n")
    return subprocess.run(
        ["flwr", "run", str(app), "server", "--run-config", f'folder="{folder}"'],
        env=make_process_env(home),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_a_local_process_without_the_secret_runs_nothing(tmp_path):
    """The server's own run gives up meanwhile, and says why."""
    keys, run_folder = tmp_path / "keys", tmp_path / "run"
    make_federation_keys(keys, devices=1)
    open_run(run_folder, make_experiment(fleet={"size": 1}))
    server = ServerSupervisor(
        "federated", run_folder, ServerSettings(patience=1.0), port=find_free_port(), keys=keys
    )
    with run_supervisor(server):
        security = f'root-certificates = "{keys / "ca.crt"}"'
        result = start_foreign_app(tmp_path, server.address, security)
        if result.returncode == 0:  # SuperExec starts it within a second
            wait_until((tmp_path / "ran-on-server").exists, "the foreign app to run")
        with pytest.raises(ChildProcessError, match="expected 1 or more devices online, got 0"):
            list(server.watch())
    assert result.returncode != 0
    assert not (tmp_path / "ran-on-server").exists()


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
