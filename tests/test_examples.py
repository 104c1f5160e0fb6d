"""The numbered examples run, and stay short."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_has_at_most_60_lines(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir()), "an example must clean up"
