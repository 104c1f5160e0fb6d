"""Options of commands can come from one TOML file with a table per command."""

import pytest

from pliant import cli

SPEC = '[method]\ntype = "fedavg"\n\n[fleet]\nsize = 3\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(SPEC)
    return tmp_path


def run(folder, text, *arguments, capsys):
    (folder / "pliant.toml").write_text(text)
    return cli.main([*arguments, "--config", "pliant.toml"]), capsys.readouterr()


def test_a_command_reads_its_table_and_the_command_line_comes_first(folder, capsys):
    text = '[server]\nspec = "experiment.toml"\nkeys = "a"\n\n[device]\nnumber = -3\n'
    code, output = run(folder, text, "server", capsys=capsys)
    assert (code, "a" in output.err) == (2, True)  # no such folder of keys
    code, output = run(folder, text, "device", capsys=capsys)
    assert (code, output.err) == (2, "pliant: Expected --number from 0, got -3\n")
    code, output = run(folder, text, "device", "--number", "-5", capsys=capsys)
    assert (code, output.err) == (2, "pliant: Expected --number from 0, got -5\n")


def test_an_unknown_key_is_named(folder, capsys):
    code, output = run(folder, "[device]\ncpu_shares = 0.3\n", "device", capsys=capsys)
    assert code == 2
    assert "cpu" in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--config"], "--config: expected a TOML file, found nothing after it"),
        (["--config", "none.toml"], "none.toml: expected a file or folder, found none"),
    ],
)
def test_a_missing_file_is_refused(folder, arguments, problem, capsys):
    assert cli.main(["device", *arguments]) == 2
    assert capsys.readouterr().err == f"pliant: {problem}\n"
