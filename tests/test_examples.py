"""The numbered examples run, and stay short."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples").glob("[0-9]*.py"))
# Split learning and deployment, which take long; other tests run both on smaller inputs.
SLOW = ("10_adasplit", "11_one_shot_split", "12_deployment")
EXAMPLES = [
    pytest.param(path, marks=pytest.mark.slow) if path.stem in SLOW else path for path in FILES
]


def test_there_are_examples():
    assert len(EXAMPLES) >= 6


def test_the_readme_shows_the_first_example():
    _, _, code = FILES[0].read_text().partition('"""\n\n')
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_has_at_most_60_lines(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir()), "an example must clean up"
