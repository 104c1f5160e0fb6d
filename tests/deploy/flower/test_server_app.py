"""A ServerApp that gives up tells its supervisor why."""

from types import SimpleNamespace

import msgspec
import pytest
from tests.deploy.flower.test_strategy import make_local_grid
from tests.deploy.in_process import make_experiment
from tests.deploy.supervise.test_federation import find_free_port

from pliant.deploy.server.rounds import NotEnoughDevices
from pliant.deploy.settings import FAILURE_FILE, SETTINGS_FILE, ServerSettings
from pliant.deploy.supervise.federation import open_run
from pliant.deploy.supervise.server import ServerSupervisor

# importing Flower's old Typer warns under a new Click
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_run_without_devices_ends_with_its_reason(tmp_path):
    from pliant.deploy.flower import server_app

    settings = ServerSettings(patience=0.1)
    open_run(tmp_path, make_experiment(fleet={"size": 1}))
    (tmp_path / SETTINGS_FILE).write_bytes(msgspec.json.encode(settings))
    context = SimpleNamespace(run_config={"folder": str(tmp_path)})
    reason = "expected 1 or more devices online, got 0"
    with pytest.raises(NotEnoughDevices, match=reason):
        server_app.main(make_local_grid(None, {}), context)
    server = ServerSupervisor("federated", tmp_path, settings, port=find_free_port())
    with pytest.raises(ChildProcessError, match=reason):
        server.services[-1].react(None)


def test_an_error_in_a_users_file_is_the_reason(tmp_path):
    from pliant.deploy.flower import server_app

    (tmp_path / "own.py").write_text("raise SystemExit(0)\n")
    folder = tmp_path / "run"
    open_run(folder, make_experiment(network={"name": f"{tmp_path}/own.py:net"}))
    (folder / SETTINGS_FILE).write_bytes(msgspec.json.encode(ServerSettings()))
    with pytest.raises(SystemExit):
        server_app.main(None, SimpleNamespace(run_config={"folder": str(folder)}))
    assert (folder / FAILURE_FILE).read_text() == f"{tmp_path}/own.py:1: SystemExit: 0"
