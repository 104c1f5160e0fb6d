import json

from tests.deploy.in_process import InProcessTransport, make_devices, make_experiment, serve_rounds

from pliant import cli
from pliant.deploy.device import agent
from pliant.deploy.device.host import HostStatus
from pliant.deploy.server.presence import read_presence
from pliant.experiment.config import start_run


def test_status_lists_devices_and_how_their_tasks_ended(tmp_path, capsys, monkeypatch):
    host = HostStatus(1.0, 0.0, is_charging=True, is_hot=False, charge=0.63)
    monkeypatch.setattr(agent, "read_host", lambda: host)
    experiment, run = make_experiment("fedavg"), tmp_path / "run"
    start_run(run, experiment)
    devices = make_devices(experiment, tmp_path)
    lies = {1: lambda raw: raw[:-1]}  # the first reply of device 1 is cut short
    transport = InProcessTransport(
        devices, lambda device, round, raw: lies.pop(device, lambda raw: raw)(raw)
    )
    online = []
    transport.find_online_devices = lambda: online.append(read_presence(run).online) or {0, 1, 2}
    serve_rounds(experiment, transport, run)
    assert online[-1] == (0, 1, 2)  # while the server ran
    assert cli.main(["server", "status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["rounds"], status["planned"]) == (2, 2)
    found = [(d["device"], d["online"], d["merged"], d["rejected"]) for d in status["devices"]]
    assert found == [(0, False, 2, 0), (1, False, 1, 1), (2, False, 2, 0)]
    assert status["devices"][1]["battery"] == {"charge": 0.63, "is_charging": True}
    assert status["devices"][0]["shares"] == [1.0, 1.0]  # FedAvg trains the full network
    assert all(device["speed"] > 0 for device in status["devices"])
    assert all(device["last_seen"] > 0 for device in status["devices"])
    assert cli.main(["server", "status", str(run)]) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("2 rounds closed, 2 planned; 0 of 3 devices online, seen ")
    names = ["battery", "MAC/s", "rows", "MACs", "merged", "late", "rejected", "last"]
    assert header.split() == ["device", "online", "last", "seen", *names]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert all(" 63%+ " in row for row in rows)


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path, capsys):
    assert cli.main(["server", "status", str(tmp_path)]) == 2
    assert "expected a run folder" in capsys.readouterr().err
