"""User networks and data, named in an experiment file."""

import pickle
from pathlib import Path

import pytest
import torch

from pliant.cli import main
from pliant.experiment.build import build_experiment
from pliant.experiment.config import load_experiment
from pliant.experiment.sweep import load_sweep
from pliant.experiment.user_code import load_function
from pliant.user_errors import describe_user_error

OWN_CODE = """
import torch
from helper import WIDTH
from pliant.data import ImageDataset, TrainTestData

def network(classes, channels, width=WIDTH):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, width, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(width * 36, classes),
    )

def waves():
    labels = torch.arange(120) % 3
    pixels = torch.zeros(120, 2, 8, 8) + labels[:, None, None, None]
    images = ImageDataset.from_tensors(pixels, labels)
    return TrainTestData(images, images)

def number():
    return 3

several = (1, 2)
"""

SPEC = """
rounds = 1
[method]
type = "fedavg"
[fleet]
size = 4
[network]
name = "own.py:network"
[data]
name = "own.py:waves"
proxy = 20
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN_CODE)
    (tmp_path / "helper.py").write_text("WIDTH = 5\n")
    path = tmp_path / "run.toml"
    path.write_text(SPEC)
    return path


def test_user_functions_are_found_relative_to_the_file(spec, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    experiment = load_experiment(spec)
    net, data = build_experiment(experiment)
    assert net[0].weight.shape == (5, 2, 3, 3)  # as many channels as the images
    assert net[2].out_features == 3
    assert len(data) == 4
    again, _ = build_experiment(experiment)
    assert torch.equal(net[0].weight, again[0].weight)
    assert Path(experiment.network.name.partition(":")[0]).is_absolute()


def test_user_functions_take_options_from_a_matrix(spec):
    spec.write_text(SPEC + "\n[matrix]\n'network.options.width' = [2, 3]\n")
    widths = [build_experiment(run.experiment)[0][0].out_channels for run in load_sweep(spec)]
    assert widths == [2, 3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.name=own.py:nothing", "expected a function 'nothing', found none"),
        ("network.name=own.py:several", "expected a function 'several', found none"),
        ("network.name=gone.py:network", "gone.py: expected a Python file, found none"),
        ("network.name=own.py:number", "expected an nn.Module, got int"),
        ("network.name=own.py:", "Expected file.py:function or package.module:function"),
        ("network.name=no.such.module:net", "Expected an installed module 'no.such.module'"),
        ("network.options.depth=3", "network .*own.py:network: got an unexpected keyword"),
        ("data.name=own.py:number", "expected a pliant.data.TrainTestData, got int"),
        ("network.name=digits_cmn", "unknown network 'digits_cmn'; did you mean 'digits_cnn'"),
    ],
)
def test_missing_user_code_is_a_one_line_error(spec, override, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        build_experiment(load_experiment(spec, [override]))
    assert "\n" not in str(caught.value)


FAULTY_METHOD = """
import sys
import pliant as pl

class Faulty(pl.Value, frozen=True):
    local: pl.LocalTraining = pl.LocalTraining()

    def train(self, net, task, steps):
        return {}["absent"]

class Exits(Faulty, frozen=True):
    def train(self, net, task, steps):
        sys.exit(0)
"""


@pytest.mark.parametrize(
    ("command", "workers", "name", "error"),
    [
        ("run", "inline", "Faulty", "9: KeyError: 'absent'"),
        ("run", "processes", "Faulty", "9: KeyError: 'absent'"),
        ("compare", "processes", "Faulty", "9: KeyError: 'absent'"),  # only a worker loads it
        ("run", "inline", "Exits", "13: SystemExit: 0"),
        ("compare", "processes", "Exits", "13: SystemExit: 0"),
    ],
)
def test_an_error_in_user_code_names_the_file_and_the_line(
    command, workers, name, error, spec, tmp_path, capsys
):
    (tmp_path / "faulty.py").write_text(FAULTY_METHOD)
    words = [f"method.type=faulty.py:{name}", f'workers={{type="{workers}"}}']
    if command == "compare":
        words.append("matrix.seed=[0]")
    assert main([command, str(spec), *words, "--out", str(tmp_path / "runs" / "run")]) == 2
    assert capsys.readouterr().err == f"pliant: {tmp_path / 'faulty.py'}:{error}\n"
    assert not (tmp_path / "runs").exists()  # the corrected command may use it


def test_an_error_in_user_code_is_not_hidden(spec, tmp_path):
    (tmp_path / "broken.py").write_text("import does_not_exist\n")
    with pytest.raises(ModuleNotFoundError, match="does_not_exist"):
        load_function(f"{tmp_path}/broken.py:network")


def test_an_installed_module_is_found():
    assert load_function("math:sqrt")(4.0) == 2.0


def test_files_with_the_same_name_are_different_modules(tmp_path):
    source = "class Own:\n    number = {}\ndef make():\n    return Own()\n"
    files = [tmp_path / name / "own.py" for name in ("first", "second")]
    for number, path in enumerate(files):
        path.parent.mkdir()
        path.write_text(source.format(number))
    made = [load_function(f"{path}:make")() for path in files]
    assert [own.number for own in made] == [0, 1]
    assert [pickle.loads(pickle.dumps(own)).number for own in made] == [0, 1]
    assert load_function(f"{files[0]}:Own") is type(made[0])


def test_a_module_of_pliant_is_not_blamed_as_the_users():
    make = load_function("pliant.nn.models.cnn:digits_cnn")
    with pytest.raises(ValueError, match="expected `classes`") as caught:
        make(classes=-1)
    assert describe_user_error(caught.value) is None
