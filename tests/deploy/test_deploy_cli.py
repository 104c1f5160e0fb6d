import os
import socket

import pytest

from pliant.cli import deploy, main
from pliant.deploy import federation
from pliant.deploy.keys import make_keys
from pliant.deploy.server import Server
from pliant.experiment import load_experiment

SPEC = """
rounds = 1
[method]
type = "fedavg"
[fleet]
size = 1
"""


def test_init_makes_keys_and_names_them(tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "keys"), "--devices", "2"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "keys" / "devices" / "1" / "key") in told
    assert main(["deploy", "init", str(tmp_path / "keys"), "--devices", "2"]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["server", "SPEC"], "either --keys FOLDER"),
        (["server", "SPEC", "--keys", "nowhere", "--insecure"], "either --keys FOLDER"),
        (["server", "SPEC", "--insecure", "--host", "0.0.0.0"], "loopback only"),
        (["server", "SPEC", "--insecure", "--squeeze", "zip"], "squeeze"),
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
            "Expected --data FOLDER that is there, got nowhere",
        ),
        (
            ["device", "--server", "localhost:1", "--number", "0", "--insecure", "--code=nowhere"],
            "Expected --code FOLDER that is there, got nowhere",
        ),
        (["device", "--server", "localhost:1", "--number", "0", "--keys", "nowhere"], "nowhere"),
        (["deploy", "init", "keys", "--devices", "0"], "Expected --devices of 1 or more, got 0"),
        (["deploy", "up", "--devices", "0"], "Expected --devices of 1 or more, got 0"),
        (["deploy", "up", "ronds=2"], "did you mean 'rounds'?"),
        (["deploy", "up", "rounds.deep=2"], "rounds"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys, command, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    given = ["spec.toml" if part == "SPEC" else part for part in command]
    if given[0] == "device":
        given += ["--state", str(tmp_path / "state")]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["method.cut=nowhere"], "nowhere"),
        (["data.devices=2", "fleet.size=3"], "Expected 2 devices, one a client of the data, got 3"),
        (["--squeeze", "fp16"], "Expected --squeeze plain"),
        (["--host", "0.0.0.0"], "loopback only"),
    ],
)
def test_a_split_method_that_cannot_be_served_leaves_no_folder(
    tmp_path, monkeypatch, capsys, options, said
):
    monkeypatch.chdir(tmp_path)
    spec = SPEC.replace("fedavg", "adasplit") + '[network]\nname = "lenet_small"\n'
    (tmp_path / "spec.toml").write_text(spec)
    assert main(["server", "spec.toml", "--insecure", *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def listing(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


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
    make_keys(tmp_path / "keys", devices=1)
    before = listing(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(command.replace("TAKEN", port).split()) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert listing(tmp_path) == before


def test_keys_that_do_not_fit_leave_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    make_keys(tmp_path / "keys", devices=1)
    assert main(["server", "spec.toml", "fleet.size=2", "--keys", "keys"]) == 2
    assert "expected keys for 2 devices" in capsys.readouterr().err
    (tmp_path / "keys" / "devices").rename(tmp_path / "keys" / "elsewhere")
    assert main(["server", "spec.toml", "--keys", "keys"]) == 2
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def calm(monkeypatch):
    """Start no process: a server that is done when it begins, and devices that only exist."""
    made = []

    class Calm(federation.Federation):
        def start(self):
            made.append(self)

        def watch(self):
            return iter(())

    monkeypatch.setattr(federation, "Federation", Calm)
    monkeypatch.setattr(Server, "start", lambda self: None)
    monkeypatch.setattr(Server, "watch", lambda self: iter(()))
    return made


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def test_the_folder_of_another_run_is_left_alone(tmp_path, monkeypatch, capsys, calm):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    command = ["deploy", "up", "spec.toml", "--port", free_port()]
    assert main([*command, "--insecure"]) == 0
    before = listing(tmp_path)
    capsys.readouterr()
    assert main([*command, "seed=7"]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_start_and_end_are_told(tmp_path, monkeypatch, capsys, calm):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    make_keys(tmp_path / "keys", devices=1)
    port = free_port()
    assert main(["server", "spec.toml", "--keys", "keys", "--port", port]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"listening at 127.0.0.1:{port} (TLS), waiting for 1 device",
        "the run is in runs/spec",
    ]


def test_up_takes_overrides_without_a_file(tmp_path, monkeypatch, capsys, calm):
    monkeypatch.chdir(tmp_path)
    options = ["--insecure", "--port", free_port()]
    assert main(["deploy", "up", "rounds=2", "fleet.round_seconds=9", *options]) == 0
    assert "(no TLS), waiting for 3 devices" in capsys.readouterr().out
    experiment = federation.recall(tmp_path / "runs" / "deploy")
    assert experiment.rounds == 2
    assert (experiment.fleet.size, experiment.fleet.round_seconds) == (3, 9.0)


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ([], 1, ""),
        (["--devices", "1"], 1, ""),
        (["--devices", "2"], 2, "taking --devices 2, not fleet.size = 1\n"),
    ],
)
def test_up_starts_as_many_devices_as_the_file_says(
    tmp_path, monkeypatch, capsys, calm, options, size, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    told = ["spec.toml", "--insecure", "--port", free_port()]
    assert main(["deploy", "up", *told, *options]) == 0
    assert len(calm[0].devices) == size
    assert capsys.readouterr().err == said


def test_up_starts_a_whole_fleet_only_if_it_is_told_to(tmp_path, monkeypatch, capsys, calm):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    told = ["spec.toml", "fleet.size=40", "--insecure", "--port", free_port()]
    assert main(["deploy", "up", *told]) == 2
    assert "Expected --devices N: fleet.size = 40" in capsys.readouterr().err
    assert main(["deploy", "up", *told, "--devices", "2"]) == 0
    assert len(calm[0].devices) == 2


def test_devices_of_up_get_the_folders_that_the_experiment_names(tmp_path, monkeypatch, calm):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mynet.py").write_text("from pliant.nn.models import digits_cnn as build")
    (tmp_path / "spec.toml").write_text(SPEC + '[network]\nname = "mine/mynet.py:build"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "PLIANT_DATA", str(tmp_path / "sets"))
    assert main(["deploy", "up", "spec.toml", "--insecure", "--port", free_port()]) == 0
    limits = calm[0].devices[0].limits
    assert (limits.code, limits.data) == (str(tmp_path / "mine"), str(tmp_path / "sets"))


def test_files_in_two_folders_and_folders_by_name(tmp_path):
    spec = SPEC + '[network]\nname = "a/net.py:build"\n[data]\nname = "b/data.py:load"\n'
    (tmp_path / "spec.toml").write_text(spec)
    experiment = load_experiment(tmp_path / "spec.toml")
    with pytest.raises(
        ValueError, match=r"Expected --code FOLDER with all files, got .*/a and .*/b"
    ):
        deploy.limits_of(experiment, None, None)
    limits = deploy.limits_of(experiment, tmp_path, tmp_path)
    assert (limits.data, limits.code) == (str(tmp_path), str(tmp_path))
