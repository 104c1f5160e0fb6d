"""How a process of a deployment ends."""

import os
import sys

import msgspec
import pytest

from pliant import user_errors
from pliant.deploy.settings import EXIT_REPORTED, run_process
from pliant.experiment.user_code import load_function


class Setup(msgspec.Struct):
    """Nothing to set up."""


class Ended(BaseException):
    """The end of the process."""


@pytest.fixture
def end(monkeypatch):
    """Return a function that runs a process in this one, and returns its exit code."""

    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["process", "{}"])

    def run(main, *reported):
        with pytest.raises(Ended) as ended:
            run_process(main, Setup, reported, uses_torch=False)
        return ended.value.args[0]

    return run


@pytest.mark.parametrize("error", ["SystemExit: 0", "ValueError: too few"])
def test_the_last_line_names_the_users_file_and_line(error, end, tmp_path, capsys):
    name, _, text = error.partition(": ")
    (tmp_path / "own.py").write_text(f"def fail():\n    raise {name}({text!r})\n")
    fail = load_function(f"{tmp_path}/own.py:fail")
    assert end(lambda setup: fail(), ValueError) == EXIT_REPORTED
    assert capsys.readouterr().err == f"{tmp_path}/own.py:2: {error}\n"


def test_only_expected_errors_of_our_own_are_reported(end, capsys, monkeypatch):
    monkeypatch.setattr(user_errors, "_user_folders", set())  # other tests load code of this folder

    def fail(setup):
        raise ValueError("expected")

    assert end(fail, ValueError) == EXIT_REPORTED
    assert capsys.readouterr().err == "expected\n"
    with pytest.raises(ValueError, match="expected"):  # a bug, with its traceback
        run_process(fail, Setup, uses_torch=False)
