import json

import pytest
import torch
from safetensors.torch import load_file

import pliant as pl
from pliant import cli

SPEC = """
rounds = 2
per_round = 2
workers = { type = "inline" }

[method]
type = "fedavg"
local = { batch = 10 }

[fleet]
size = 400

[network]
name = "digits_cnn_bn"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "small.toml").write_text(SPEC)
    assert cli.main(["run", str(folder / "small.toml"), "--out", str(folder / "run")]) == 0
    return folder


def test_an_exported_network_has_the_recorded_accuracy(folder, capsys):
    assert cli.main(["model", "export", str(folder / "run")]) == 0
    path = folder / "run" / "model.safetensors"
    assert capsys.readouterr().out == f"{path}\n"
    assert cli.main(["model", "info", str(path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    net, test = pl.models.digits_cnn_bn().eval(), pl.data.digits().test
    net.load_state_dict(load_file(path))
    mean, std = (torch.tensor(info["input"][key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        scores = net((test.pixels.float() - mean) / std)
    accuracy = (scores.argmax(1) == test.labels).float().mean().item()
    last = [r for r in pl.read_records(folder / "run") if isinstance(r, pl.RoundRecord)][-1]
    assert accuracy == pytest.approx(last.accuracy, abs=1e-3)
    assert info["accuracy"] == last.accuracy
    assert (info["rounds"], info["classes"]) == (2, list("0123456789"))


def test_info_is_a_table(folder, capsys):
    cli.main(["model", "export", str(folder / "run"), "--out", str(folder / "a.safetensors")])
    capsys.readouterr()
    assert cli.main(["model", "info", str(folder / "a.safetensors")]) == 0
    table = capsys.readouterr().out
    assert "network     digits_cnn_bn\n" in table
    assert "input       samples of 1 x 28 x 28, uint8\n" in table
    assert "to be done by the caller\n" in table


def test_wrong_names_and_runs_are_refused_in_one_line(folder, tmp_path, capsys):
    run = str(folder / "run")
    assert cli.main(["model", "export", run, "--out", str(tmp_path / "model.bin")]) == 2
    assert "Expected --out to end in .safetensors" in capsys.readouterr().err
    assert cli.main(["model", "export", str(tmp_path)]) == 2
    assert "expected a run folder, found no config.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["model", "info", str(tmp_path / "none.safetensors")]) == 2
    assert "expected a file or folder, found none" in capsys.readouterr().err
