"""The files, commands and code of the tutorial run in their order."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from pliant.cli import DONE, main

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w.]+\.(?:toml|py))\n")

pytestmark = pytest.mark.waits


def list_blocks(page):
    """Return the fenced blocks of a page that have a language."""
    return BLOCK.findall((DOCS / page).read_text())


def test_the_tutorial_has_every_kind_of_block():
    kinds = [kind for kind, _ in list_blocks("tutorial.md")]
    assert set(kinds) == {"sh", "toml", "python"}


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind, text in list_blocks("tutorial.md"):
        name = FILE_NAME.match(text)
        if name:
            Path(name[1]).write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "pliant"
                assert main(arguments) == DONE, f"{line}\n{capsys.readouterr().err}"
        elif kind == "python":
            Path("block.py").write_text(text)
            runpy.run_path("block.py", run_name="__main__")
        else:
            pytest.fail(f"a {kind} block without a file name:\n{text}")
    folders = {path.name for path in Path("runs").iterdir()}
    assert folders == {"first", "other_seed", "methods", "search", "with_table", "mine"}
    assert "GMACs" in capsys.readouterr().out
