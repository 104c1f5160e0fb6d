import pytest

from pliant.cli import main

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
            "cpu_share",
        ),
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
