"""Over 250 more wrong command lines: one line each, nothing left behind, and a second chance."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from pliant.cli import FAILED, WRONG_INPUT, main

PAIRS = iter(Path(__file__).with_name("wrong_lines.txt").read_text().splitlines()[1:])
WRONG = [(line, next(PAIRS).strip()) for line in PAIRS]

GOOD = """
rounds = 1
workers = { type = "inline" }
method = { type = "fedavg" }
fleet = { size = 4 }
data = { proxy = 7960 }
"""
COMPARE = "compare good.toml matrix.seed=[1]"
FILES = {
    "good.toml": GOOD,
    "split.toml": """
rounds = 1
server_speed = 1e12
workers = { type = "inline" }
network = { name = "lenet_small" }
method = { type = "adasplit" }
fleet = { size = 2 }
data = { proxy = 7960 }
rules = { late = "wait" }
""",
    "searched.toml": """
workers = { type = "inline" }
search = { rows = 4 }
data = { proxy = 100 }
""",
    "own_input.toml": GOOD + "network = { input = [1, 28, 28], classes = 10 }\n",
    "conf.toml": '[run]\nouut = "x"\n',
    "empty.toml": "",
    "empty.csv": "",
    "broken.safetensors": "no tensors here",
    "broken.onnx": "no graph",
    "broken.pt2": "no archive",
    "syntax.py": "def net(:\n",
    "raises.py": """
def net():
    raise RuntimeError("no network today")

def number():
    return 3
""",
    "own.py": """
import torch
from torch import nn

import pliant as pl


class Method(pl.Value, frozen=True):
    local: pl.LocalTraining = pl.LocalTraining()

    def init_state(self, params):
        return pl.ServerState(params)


class FailsInMerge(Method, frozen=True, tag="merge"):
    power: float = 1.0

    def merge(self, net, state, updates):
        list(updates)
        return {}["missing"]  # FailsInMerge


class FailsInTraining(Method, frozen=True, tag="training"):
    def train(self, net, task, steps):
        return undefined_name  # FailsInTraining

    def merge(self, net, state, updates):
        return pl.ServerState(state.params)


class ReturnsNothing(Method, frozen=True, tag="nothing"):
    def merge(self, net, state, updates):  # ReturnsNothing
        return None


class LosesLayers(Method, frozen=True, tag="loses"):
    def merge(self, net, state, updates):  # LosesLayers
        return pl.ServerState({})


class SendsNothing(Method, frozen=True, tag="sends"):
    def train(self, net, task, steps):  # SendsNothing
        return None


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        return self.innner(x)  # Network


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x, x


def few_scores():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 3))


def negative_labels():
    labels = torch.arange(40) - 20
    return pl.ImageDataset.from_tensors(torch.rand(40, 1, 28, 28), labels)  # negative_labels


def two_lines():
    raise ValueError("two\\nlines")  # two_lines


def no_message():
    raise StopIteration  # no_message
""",
    "odd.py": """
import sys


class Abort(BaseException):
    pass


def recurse():
    return recurse()


def generate():
    yield 1


def abort():
    raise Abort("stop it")


def leave():
    sys.exit()


value = 3
""",
    "leaves.py": "raise SystemExit(0)\n",
    "locked": "a file, not a folder",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    (folder / "circle.toml").symlink_to("circle.toml")
    for name, file in (("done", "good.toml"), ("split", "split.toml")):
        assert main(["run", str(folder / file), "--out", str(folder / name)]) == 0
    for name in ("cut_run", "old_run", "several/first", "several/second"):
        shutil.copytree(folder / "done", folder / name)
    events = folder / "cut_run" / "events.jsonl"
    events.write_bytes(events.read_bytes()[:696])
    config = json.loads((folder / "done" / "config.json").read_text())
    (folder / "old_run" / "config.json").write_text(json.dumps(config | {"format": 1}))
    return folder


def list_paths(folder):
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(path for path in paths if "__pycache__" not in path)


def check_refusal(line, part, folder, capsys, expected_code=WRONG_INPUT):
    """Check that a command line is refused in one line and leaves no file."""
    before = list_paths(folder)
    capsys.readouterr()
    code = main(shlex.split(line))
    output, errors = capsys.readouterr()
    assert (code, output) == (expected_code, ""), errors
    assert errors.startswith("pliant: ")
    assert errors.count("\n") == 1
    assert part in errors
    assert "internal error" not in errors
    assert "Errno" not in errors
    assert list_paths(folder) == before


@pytest.mark.parametrize(("line", "part"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_command_line_is_refused_in_one_line(line, part, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PLIANT_DATA", raising=False)
    check_refusal(line, part, folder, capsys)


def test_a_missing_library_is_named_before_anything_is_read(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_refusal("report done", "pip install 'pliant[report]'", folder, capsys)


def test_there_are_a_hundred():
    assert len({line for line, _ in WRONG}) >= 100


@pytest.mark.parametrize(
    ("line", "name", "problem"),
    [
        (
            "run good.toml network.name=own.py:Network",
            "Network",
            "NotTraceable: Network cannot",
        ),
        ("inspect own.py:Network --shape 1,28,28", "Network", "AttributeError: 'Network' object"),
        ("run good.toml method.type=own.py:FailsInMerge", "FailsInMerge", "KeyError: 'missing'"),
        (
            "run good.toml method.type=own.py:FailsInTraining",
            "FailsInTraining",
            "NameError: name 'undefined_name' is not defined",
        ),
        (
            "run good.toml method.type=own.py:ReturnsNothing",
            "ReturnsNothing",
            "expected ReturnsNothing.merge to return a state like pl.ServerState, got NoneType",
        ),
        (
            "run good.toml method.type=own.py:LosesLayers",
            "LosesLayers",
            "expected LosesLayers.merge to return all parameters of the network, found none named",
        ),
        (
            "run good.toml method.type=own.py:SendsNothing",
            "SendsNothing",
            "expected SendsNothing.train to return a pl.Update, got NoneType",
        ),
        (
            "run good.toml data.name=own.py:negative_labels",
            "negative_labels",
            "ValueError: images: expected labels from 0",
        ),
        ("run good.toml data.name=own.py:two_lines", "two_lines", "ValueError: two lines\n"),
        ("run good.toml data.name=own.py:no_message", "no_message", "StopIteration\n"),
        (
            "compare good.toml matrix.seed=[0] method.type=own.py:FailsInMerge",
            "FailsInMerge",
            "KeyError: 'missing'",
        ),
    ],
)
def test_an_error_in_the_users_file_names_its_line(
    line, name, problem, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    lines = FILES["own.py"].splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.endswith(f"# {name}"))
    before = list_paths(folder)
    code = main(shlex.split(line))
    errors = capsys.readouterr().err
    assert code == WRONG_INPUT
    assert errors.count("\n") == 1
    assert f"own.py:{number}: {problem}" in errors
    assert list_paths(folder) == before


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("run good.toml --out new seed=no", "run good.toml --out new seed=1"),
        ("run good.toml --out new method.type=fedavgg", "run good.toml --out new"),
        ("run split.toml --out new method.cut=nowhere", "run split.toml --out new"),
        ("run --resume done --out new", "run --resume done"),
        ("compare good.toml --out new matrix.seed=[1,1]", f"{COMPARE} --out new"),
        (f"{COMPARE} --out done", f"{COMPARE} --out new"),
        ("model export done --out new.onnx", "model export done --out new.safetensors"),
        ("deploy init locked", "deploy init new"),
        ("inspect lenet --shape 1,28", "inspect lenet --shape 3,32,32 --cuts"),
        ("--config conf.toml run good.toml --out new", "run good.toml --out new"),
    ],
)
def test_the_corrected_command_works_at_once(wrong, right, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = list_paths(folder)
    assert main(shlex.split(wrong)) == WRONG_INPUT
    assert list_paths(folder) == before
    assert main(shlex.split(right)) == 0, capsys.readouterr().err
    for name in ("new", "new.safetensors"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def test_a_network_larger_than_the_memory_is_said_to_be(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    line = "run good.toml network.options.hidden=100000000000"
    check_refusal(line, "not enough memory for 153,600.0 GB", folder, capsys, FAILED)
