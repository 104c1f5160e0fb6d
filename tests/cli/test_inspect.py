"""`pliant inspect`, `pliant compare` and `pliant bench` on the command line."""

import json
from pathlib import Path

import pytest

from pliant.cli import REFUSED, main

OWN_NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))

def number():
    return 3

class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
"""


def test_inspect_shows_sites_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "femnist_cnn"]) == 0
    output = capsys.readouterr().out
    assert "MACs per sample at rate 0.0: 4,015,616 (1.000)" in output
    assert "MACs per sample at rate 0.5: 1,196,544 (0.298)" in output
    assert "no value had to be made dense" in output


def test_long_lines_are_broken_below_their_column_on_a_terminal(monkeypatch, capsys) -> None:
    assert main(["inspect", "resnet20"]) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["inspect", "resnet20"]) == 0
    wrapped = capsys.readouterr().out
    assert max(map(len, wrapped.splitlines())) <= 100 < max(map(len, plain.splitlines()))
    assert wrapped.split() == plain.split()
    column = plain.index("layers")
    assert any(line.startswith(f"{column * ' '}stages.") for line in wrapped.splitlines())


@pytest.mark.parametrize("name", ["text_transformer", "signal_cnn"])
def test_inspect_takes_networks_of_sequences(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", name, "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["macs"]["0.5"] < 0.4 * description["macs"]["0.0"]
    assert not description["dense"]


def test_inspect_takes_a_users_network_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.py").write_text(
        "from torch import nn\n\ndef build():\n"
        "    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))\n"
    )
    path = f"{tmp_path}/text.py:build"
    assert main(["inspect", path, "--shape", "5", "--tokens", "--json"]) == 0
    [site] = json.loads(capsys.readouterr().out)["sites"]
    assert (site["layers"], site["filters"], site["feeds"]) == (["0"], 4, ["2"])


def test_inspect_takes_a_users_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(OWN_NET)
    assert main(["inspect", f"{tmp_path}/mine.py:build", "--shape", "3,8,8", "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["sites"] == [{"layers": ["0"], "filters": 8, "macs": 7776, "feeds": ["3"]}]
    assert description["full"] == [{"layer": "3", "why": "its channels reach the output"}]


def test_a_refused_network_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN_NET)
    assert main(["inspect", f"{tmp_path}/mine.py:Branch", "--shape", "3,8,8"]) == REFUSED == 3
    errors = capsys.readouterr().err
    assert errors.startswith("pliant: Branch cannot be traced: a branch on the value of a tensor")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nothing"], "unknown network 'nothing'"),
        (["inspect", "nowhere.py:build"], "nowhere.py: expected a Python file, found none"),
        (["inspect", "no.such.module:build"], "Expected an installed module 'no.such.module'"),
        (["inspect", "pliant.nn.models:nothing"], "expected a function 'nothing', found none"),
        (["inspect", "resnet20", "--shape", "3,x"], "Expected a shape like 3,32,32"),
        (["inspect", "pliant.nn.models:resnet20"], "Expected --shape"),
        (["bench", "elastic", "nothing"], "unknown network 'nothing'"),
        (["compare", "nowhere.toml"], "nowhere.toml"),
        (["compare", "nowhere.toml", "--target", "2"], "Expected a target accuracy"),
    ],
)
def test_wrong_arguments_are_one_line_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
