import os
import socket
from pathlib import Path

import pytest

from pliant.cli import deploy, main
from pliant.deploy.security.certificates import make_keys
from pliant.deploy.supervise import federation
from pliant.deploy.supervise.server import ServerSupervisor
from pliant.experiment.config import load_experiment

SPEC = """
rounds = 1
[method]
type = "fedavg"
[fleet]
size = 1
"""


FORM = ["network.input=[1,28,28]", "network.classes=10"]
OWN = ["server", "SPEC", "--insecure", *FORM]


def test_init_makes_keys_and_prints_their_paths(tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "keys")]) == 0
    paths = capsys.readouterr().out.splitlines()
    assert {Path(path).name for path in paths} == {
        "ca.crt", "ca.key", "server.pem", "server.key", "format"
    }  # fmt: skip
    assert main(["deploy", "init", str(tmp_path / "keys")]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["server", "SPEC"], "either --keys FOLDER"),
        (["server", "SPEC", "--keys", "nowhere", "--insecure"], "either --keys FOLDER"),
        (["server", "SPEC", "--insecure", "--host", "0.0.0.0"], "loopback only"),
        (["server", "SPEC", "compression.type=zip", "--insecure"], "compression"),
        (["server", "SPEC", "--keys", "nowhere"], "nowhere"),
        (["device", "--server", "localhost:1", "--number", "0"], "either --keys FOLDER"),
        (["device", "--server", "far:1", "--number", "0", "--insecure"], "loopback only"),
        (["device", "--server", "far", "--number", "0", "--insecure"], "HOST:PORT"),
        (["device", "--server", "localhost:1", "--number", "-1", "--insecure"], "from 0, got -1"),
        (
            ["device", "--server", "localhost:1", "--number", "0", "--insecure", "--cpu-share=2"],
            "Expected --cpu-share above 0 and up to 1, got 2",
        ),
        (["device", "--server", "[::1]:99999", "--number", "0", "--insecure"], "from 1 to 65535"),
        (
            ["device", "--server", "localhost:1", "--number", "0", "--insecure", "--data=nowhere"],
            "Expected an existing folder for --data, got nowhere",
        ),
        (
            ["device", "--server", "localhost:1", "--number", "0", "--insecure", "--code=nowhere"],
            "Expected an existing folder for --code, got nowhere",
        ),
        (["device", "--server", "localhost:1", "--number", "0", "--keys", "nowhere"], "nowhere"),
        (["server", "devices", "list", "--keys", "nowhere"], "nowhere: expected the keys of"),
        (["device", "enrol", "--server", "a:1", "--token", "0-1-2", "--keys", "k"], "a token of"),
        (["deploy", "up", "--devices", "0"], "Expected --devices of 1 or more, got 0"),
        (["deploy", "up", "ronds=2"], "did you mean 'rounds'?"),
        (["deploy", "up", "rounds.deep=2"], "rounds"),
        (["device", "--number", "0"], "Expected --server HOST:PORT or --dry-run"),
        (["deploy", "up", "network.input=[1,28,28]", "network.classes=10"], "Expected no `input`"),
        (["server", "SPEC", "--insecure", "network.input=[1,28,28]"], "got only `input`"),
        ([*OWN, "network.mean=[0.1,0.1]"], "Expected 1 values of `mean` and `std`"),
        ([*OWN, "server.holdout=nowhere"], "nowhere: expected one folder per class"),
        ([*OWN, "server.max_samples=0"], "Expected `int` >= 1 at `server.max_samples`"),
        ([*OWN, "method.type=splitfed", "method.cut=features.2"], 'Expected rules.late = "wait"'),
        ([*OWN, "network.classes=9", "--pace", "simulated"], "as in [data], (1, 28, 28) and 10"),
        (
            ["search", "SPEC", *FORM, "search.rows=8"],
            "Expected `proxy` in [server], images to search on",
        ),
    ],
)
def test_wrong_input_is_a_one_line_error(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    arguments = ["spec.toml" if part == "SPEC" else part for part in command]
    if arguments[0] == "device" and arguments[1] != "enrol":
        arguments += ["--state", str(tmp_path / "state")]
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["method.cut=nowhere"], "nowhere"),
        (
            ["data.devices=2", "fleet.size=3"],
            "Expected 2 devices, one per client of the data, got 3",
        ),
        (["compression.type=fp16"], "Expected no `compression`"),
        (["--host", "0.0.0.0"], "loopback only"),
    ],
)
def test_a_split_method_that_cannot_be_served_leaves_no_folder(
    tmp_path, monkeypatch, capsys, options, message
):
    monkeypatch.chdir(tmp_path)
    rules = '[rules]\nlate = "wait"\n[network]\nname = "lenet_small"\n'
    spec = SPEC.replace("fedavg", "adasplit") + rules
    (tmp_path / "spec.toml").write_text(spec)
    assert main(["server", "spec.toml", "--insecure", *options]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def list_paths(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "command",
    [
        "server spec.toml --keys keys --port 99999",
        "server spec.toml --keys keys --port 0",
        "server spec.toml --keys keys --port TAKEN",
        "server spec.toml --keys keys --host 256.1.1.1",
        "deploy up spec.toml --port 99999",
        "deploy up spec.toml --port TAKEN",
    ],
)
def test_a_failed_start_leaves_no_folder(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    make_keys(tmp_path / "keys")
    before = list_paths(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(command.replace("TAKEN", port).split()) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list_paths(tmp_path) == before


def test_keys_that_do_not_match_leave_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "server.key").unlink()
    assert main(["server", "spec.toml", "--keys", "keys"]) == 2
    assert "keys/server.key: expected this file of the keys" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def federations(monkeypatch):
    """Start no processes: collect the federations, whose servers finish at once."""
    started = []

    class IdleFederation(federation.Federation):
        def start(self):
            started.append(self)

        def watch(self):
            return iter(())

    monkeypatch.setattr(federation, "Federation", IdleFederation)
    monkeypatch.setattr(ServerSupervisor, "start", lambda self: None)
    monkeypatch.setattr(ServerSupervisor, "watch", lambda self: iter(()))
    return started


def find_free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def test_the_folder_of_another_run_is_not_changed(tmp_path, monkeypatch, capsys, federations):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    command = ["deploy", "up", "spec.toml", "--port", find_free_port()]
    assert main([*command, "--insecure"]) == 0
    before = list_paths(tmp_path)
    capsys.readouterr()
    assert main([*command, "seed=7"]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert list_paths(tmp_path) == before


def test_start_and_end_are_printed(tmp_path, monkeypatch, capsys, federations):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    make_keys(tmp_path / "keys")
    port = find_free_port()
    assert main(["server", "spec.toml", "--keys", "keys", "--port", port]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"listening on 127.0.0.1:{port} (TLS), waiting for 1 device",
        "the run is saved in runs/spec",
    ]


def test_up_takes_overrides_without_a_file(tmp_path, monkeypatch, capsys, federations):
    monkeypatch.chdir(tmp_path)
    options = ["--insecure", "--port", find_free_port()]
    assert main(["deploy", "up", "rounds=2", "fleet.round_seconds=9", *options]) == 0
    assert "(no TLS), waiting for 3 devices" in capsys.readouterr().out
    experiment = federation.load_run_config(tmp_path / "runs" / "deploy")
    assert experiment.rounds == 2
    assert (experiment.fleet.size, experiment.fleet.round_seconds) == (3, 9.0)


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ([], 1, ""),
        (["--devices", "1"], 1, ""),
        (["--devices", "2"], 2, "using --devices 2 instead of fleet.size = 1\n"),
    ],
)
def test_up_starts_as_many_devices_as_the_file_says(
    tmp_path, monkeypatch, capsys, federations, options, size, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    command = ["deploy", "up", "spec.toml", "--insecure", "--port", find_free_port()]
    assert main([*command, *options]) == 0
    assert len(federations[0].devices) == size
    assert capsys.readouterr().err == message


def test_up_starts_a_large_fleet_only_on_request(tmp_path, monkeypatch, capsys, federations):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    command = ["deploy", "up", "spec.toml", "fleet.size=40"]
    command += ["--insecure", "--port", find_free_port()]
    assert main(command) == 2
    assert "Expected --devices N: fleet.size = 40" in capsys.readouterr().err
    assert main([*command, "--devices", "2"]) == 0
    assert len(federations[0].devices) == 2


def test_devices_of_up_may_use_the_folders_in_the_experiment(tmp_path, monkeypatch, federations):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mynet.py").write_text("from pliant.nn.models import digits_cnn as build")
    (tmp_path / "spec.toml").write_text(SPEC + '[network]\nname = "mine/mynet.py:build"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "PLIANT_DATA", str(tmp_path / "sets"))
    assert main(["deploy", "up", "spec.toml", "--insecure", "--port", find_free_port()]) == 0
    limits = federations[0].devices[0].limits
    assert (limits.code, limits.data) == (str(tmp_path / "mine"), str(tmp_path / "sets"))


def test_code_in_two_folders_needs_an_explicit_folder(tmp_path):
    spec = SPEC + '[network]\nname = "a/net.py:build"\n[data]\nname = "b/data.py:load"\n'
    (tmp_path / "spec.toml").write_text(spec)
    experiment = load_experiment(tmp_path / "spec.toml")
    with pytest.raises(
        ValueError, match=r"Expected --code FOLDER with all files, got .*/a and .*/b"
    ):
        deploy.make_limits(experiment, None, None)
    limits = deploy.make_limits(experiment, tmp_path, tmp_path)
    assert (limits.data, limits.code) == (str(tmp_path), str(tmp_path))
