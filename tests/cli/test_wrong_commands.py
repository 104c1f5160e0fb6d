"""Over thirty wrong command lines: each gives one line, exit code 2 and no files."""

import os

import pytest

from pliant.cli import main

GOOD = 'rounds = 1\n[method]\ntype = "fedavg"\n[fleet]\nsize = 4\n'

# a command line, and part of its error message
WRONG = [
    ("rum good.toml", "unknown command 'rum'; did you mean 'run'?"),
    ("frobnicate", "frobnicate"),
    ("run", "Expected either a TOML file or --resume FOLDER"),
    ("run nowhere.toml", "nowhere.toml"),
    ("run folder", "folder"),
    ("run good.toml --rounds 3", "--rounds"),
    ("run good.toml rounds", "Expected key=value, got 'rounds'"),
    ("run good.toml =3", "Expected key=value, got '=3'"),
    ("run good.toml rounds=0", "Expected `int` >= 1 at `rounds`, got 0"),
    ("run good.toml rounds=ten", "at `rounds`, got 'ten'"),
    ("run good.toml rounds.deep=1", "Expected a table at 'rounds'"),
    ("run good.toml ronds=3", "did you mean 'rounds'?"),
    ("run good.toml seed=1 --resume folder", "Expected either a TOML file or --resume FOLDER"),
    ("run --resume nowhere", "expected a run folder"),
    ("run --resume folder", "expected a run folder"),
    ("run good.toml --out locked/run", "locked"),
    ("run good.toml --out=", "--out: expected a value, got an empty one"),
    ("run folder", "folder: expected a file, found a folder"),
    ("run nowhere.toml", "nowhere.toml: expected a file or folder, found none"),
    ("run good.toml --out locked/deep/run", "locked/deep/run: expected folders along this path"),
    ("compare good.toml", "good.toml: expected a table [matrix] of keys and their values"),
    ("search good.toml", "good.toml: expected a table [search], found none"),
    ("compare", "spec"),
    ("compare nowhere.toml", "nowhere.toml"),
    ("compare good.toml --target 2", "Expected a target accuracy above 0 and up to 1, got 2"),
    ("compare good.toml --target high", "high"),
    ("compare good.toml matrix.seed=3", "matrix.seed"),
    ("inspect", "--model"),
    ("inspect resnet21", "resnet20"),
    ("data get cifar11", "cifar11"),
    ("data fetch", "fetch"),
    ("bench elastic resnet21", "resnet20"),
    ("demo --seed one", "one"),
    ("demo --seconds", "--seconds"),
    ("search nowhere.toml", "nowhere.toml"),
    ("search good.toml search.algorithm.type=slow", "unknown `search.algorithm.type` = 'slow'"),
    ("search good.toml search.rows=1", "at `search.rows`, got 1"),
    ("report", "Expected at least one folder of runs"),
    ("report nowhere", "nowhere"),
    ("report folder --target 0", "Expected a target accuracy above 0 and up to 1, got 0"),
    ("dash nowhere", "nowhere"),
    ("dash folder --port 99999999", "99999999"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked").write_text("a file, not a folder")
    return tmp_path


def list_paths(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_an_empty_folder_name_is_not_the_current_folder(folder, capsys):
    before = list_paths(folder)
    assert main(["run", "good.toml", "--out", ""]) == 2
    assert capsys.readouterr().err == "pliant: --out: expected a value, got an empty one\n"
    assert list_paths(folder) == before


@pytest.mark.parametrize(("line", "part"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_command_is_a_one_line_error(line, part, folder, capsys):
    before = list_paths(folder)
    code = main(line.split())
    output, errors = capsys.readouterr()
    assert code == 2
    assert output == ""
    assert errors.startswith("pliant: ")
    assert errors.count("\n") == 1
    assert part in errors
    assert "Traceback" not in errors
    assert list_paths(folder) == before


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_is_an_error(folder, capsys):
    (folder / "folder").chmod(0o500)
    assert main(["run", "good.toml", "--out", "folder/run"]) == 2
    assert "folder" in capsys.readouterr().err


def test_there_are_thirty():
    assert len(WRONG) >= 30
