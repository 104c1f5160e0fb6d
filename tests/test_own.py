"""A user's own network and data, named in the file of an experiment."""

from pathlib import Path

import pytest
import torch

from pliant.compare import members
from pliant.experiment import build, load_experiment
from pliant.own import own_function

OWN = """
import torch
from helper import WIDTH
from pliant.data import Images, Source

def network(classes, channels, width=WIDTH):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, width, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(width * 36, classes),
    )

def waves():
    labels = torch.arange(120) % 3
    images = Images.from_tensors(torch.zeros(120, 2, 8, 8) + labels[:, None, None, None], labels)
    return Source(images, images)

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
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("WIDTH = 5\n")
    path = tmp_path / "run.toml"
    path.write_text(SPEC)
    return path


def test_own_functions_are_found_beside_the_file_from_anywhere(spec, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    experiment = load_experiment(spec)
    net, data = build(experiment)
    assert net[0].weight.shape == (5, 2, 3, 3)  # channels are those of the images
    assert net[2].out_features == 3
    assert len(data) == 4
    again, _ = build(experiment)
    assert torch.equal(net[0].weight, again[0].weight)
    assert Path(experiment.network.name.partition(":")[0]).is_absolute()


def test_own_functions_take_options_and_stand_in_a_matrix(spec):
    spec.write_text(SPEC + "\n[matrix]\n'network.options.width' = [2, 3]\n")
    widths = [build(member.experiment)[0][0].out_channels for member in members(spec)]
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
        ("data.name=own.py:number", "expected a pliant.data.Source, got int"),
        ("network.name=digits_cmn", "unknown network 'digits_cmn'; did you mean 'digits_cnn'"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(spec, override, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        build(load_experiment(spec, [override]))
    assert "\n" not in str(caught.value)


def test_an_error_in_own_code_is_not_hidden(spec, tmp_path):
    (tmp_path / "broken.py").write_text("import does_not_exist\n")
    with pytest.raises(ModuleNotFoundError, match="does_not_exist"):
        own_function(f"{tmp_path}/broken.py:network")


def test_a_module_that_is_installed_is_found():
    assert own_function("math:sqrt")(4.0) == 2.0
