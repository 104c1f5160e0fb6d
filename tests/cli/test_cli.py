import os
import re
import subprocess
import sys
from contextlib import suppress
from typing import get_type_hints

import pytest
from tests.waiting import LIMIT

from pliant import cli

COMMANDS = """
from pliant.extras import require

def fine(count: int = 1) -> None:
    "Count.\\n\\nExample: pliant fine --count 2"
    print("counted", count)

def code() -> int:
    return 7

def value() -> None:
    raise ValueError("images.idx: expected 784 bytes,\\n    got 3")

def missing() -> None:
    open("/no/such/file")

def full() -> None:
    raise OSError(28, "No space left on device")

def lookup() -> None:
    raise LookupError("no data set is called 'mnits': there are mnist, cifar10")

def slip() -> None:
    {}["weight"]

def extra() -> None:
    require("no_such_library", "report")

def stopped() -> None:
    raise KeyboardInterrupt
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs a fake command and returns (exit code, output, errors)."""
    (tmp_path / "fake_commands.py").write_text(COMMANDS)
    (tmp_path / "fake_commands_extra.py").write_text(
        "from fake_commands import *\nrequire('no_such', 'report')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = [line[4:].partition("(")[0] for line in COMMANDS.splitlines() if line[:4] == "def "]
    commands = [(name, f"fake_commands:{name}", "Test.") for name in names]
    commands.append(("import_error", "fake_commands_extra:fine", "Test."))
    monkeypatch.setattr(cli, "COMMANDS", tuple(commands))

    def run(*arguments):
        code = cli.main(arguments)
        return code, *capsys.readouterr()

    yield run
    for name in ("fake_commands", "fake_commands_extra"):
        sys.modules.pop(name, None)


def run_pliant(*arguments):
    command = [sys.executable, "-m", "pliant", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_successful_command_exits_with_zero(run):
    assert run("fine", "--count", "3") == (0, "counted 3\n", "")


def test_a_command_may_choose_its_exit_code(run):
    assert run("code") == (7, "", "")


@pytest.mark.parametrize(
    ("command", "code", "line"),
    [
        ("value", 2, "images.idx: expected 784 bytes, got 3"),
        ("missing", 2, "/no/such/file: expected a file or folder, found none"),
        ("full", 1, "the disk is full"),
        ("lookup", 2, "no data set is called 'mnits': there are mnist, cifar10"),
        ("slip", 1, "internal error, KeyError: 'weight' (--debug shows where)"),
        ("extra", 2, "no_such_library is not installed: run `pip install 'pliant[report]'`"),
        ("import_error", 2, "no_such is not installed: run `pip install 'pliant[report]'`"),
        ("stopped", 130, "interrupted"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(run, command, code, line):
    assert run(command) == (code, "", f"pliant: {line}\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fien"], "unknown command 'fien'; did you mean 'fine'? There are"),
        (["--verbos"], "unknown command '--verbos'"),
        (["fine", "--cuont", "3"], "--cuont"),
        (["fine", "--count", "three"], "three"),
        (["fine", "3", "4"], "4"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(run, arguments, part):
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert part in errors
    assert errors.startswith("pliant: ")
    assert errors.endswith("(see `pliant --help`)\n")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "value"], ["value", "--debug"]])
def test_debug_anywhere_shows_the_traceback(run, arguments):
    code, _, errors = run(*arguments)
    assert code == 2
    assert "Traceback (most recent call last)" in errors
    assert "fake_commands.py" in errors


def test_a_misspelt_command_loads_no_command(run):
    run("fien")
    assert "fake_commands" not in sys.modules


def test_help_lists_the_commands_and_loads_none(run):
    code, output, errors = run("--help")
    assert (code, errors) == (0, "")
    assert "lookup: Test." in output
    assert "Exit codes: 0" in output
    assert "fake_commands" not in sys.modules


def test_help_is_plain_without_a_terminal(run):
    _, output, _ = run("fine", "--help")
    assert "Example: pliant fine --count 2" in output
    assert output.isascii()


@pytest.mark.parametrize("name", [name for name, _, _ in cli.COMMANDS])
def test_every_command_has_help_with_an_example(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert f"Example: pliant {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bench", "data", "deploy"])
def test_every_subcommand_has_help_with_an_example(name, capsys):
    app = cli.build_app(name, is_plain=True)[name]
    subcommands = [command for command in app if not command.startswith("-")]
    assert len(subcommands) > 1
    for command in subcommands:
        assert cli.main([name, command, "--help"]) == 0
        assert f"Example: pliant {name} {command}" in capsys.readouterr().out


def find_command_functions(app):
    """Return the functions of an application and of its commands."""
    functions = [] if app.default_command is None else [app.default_command]
    for name in app:
        if not name.startswith("-"):
            functions += find_command_functions(app[name])
    return functions


def test_no_option_rounds_a_number_to_an_integer():
    functions = find_command_functions(cli.build_app(None, is_plain=True))
    assert len(functions) > 20
    for function in functions:
        for name, kind in get_type_hints(function, include_extras=True).items():
            if name != "return" and re.search(r"\bint\b", repr(kind)):
                assert "parse_integer" in repr(kind), f"{function.__module__}: {name}"


@pytest.mark.parametrize("line", ["{}", "run {}", "inspect {}", "report {}", "run a --{}"])
def test_a_long_name_is_cut_off(line, capsys):
    assert cli.main(line.format("x" * 999).split()) == cli.WRONG_INPUT
    line = capsys.readouterr().err
    assert "xxx...xxx" in line
    assert len(line) < 500


def test_the_version_is_printed():
    process = run_pliant("--version")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("pliant 0.")


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX terminal")
def test_no_color_is_respected_on_a_terminal():
    assert "\x1b[" in run_help_on_a_terminal({"TERM": "xterm-256color"})
    assert "\x1b[3" not in run_help_on_a_terminal({"TERM": "xterm-256color", "NO_COLOR": "1"})


def run_help_on_a_terminal(variables):
    """Return the output of `pliant --help` on a terminal."""
    import pty

    inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "pliant", "--help"]
    with subprocess.Popen(command, stdout=child, env=inherited | variables) as process:
        os.close(child)
        output = b""
        with suppress(OSError):  # raised on Linux when the other side has closed
            while chunk := os.read(parent, 4096):
                output += chunk
        assert process.wait(LIMIT) == 0
    os.close(parent)
    return output.decode()
