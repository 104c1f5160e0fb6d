"""The pages under docs/ agree with the code: excerpts, keys, commands, links."""

import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from pliant.cli import COMMANDS
from pliant.compare import _with
from pliant.experiment import Experiment
from pliant.value import decode

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"# (examples/\w+\.py)\n(.*)", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
LEAST = {"method": {"type": "fedavg"}, "fleet": {"size": 3}}


def found(kind, folder="howto"):
    pages = [page for page in PAGES if page.parent.name == folder]
    return [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in pages
        for number, (language, text) in enumerate(BLOCK.findall(page.read_text()))
        if language == kind
    ]


@pytest.mark.parametrize("text", found("python"))
def test_python_on_a_how_to_page_stands_in_an_example(text):
    named = EXCERPT.match(text)
    assert named, "expected the name of an example in the first line"
    example = (ROOT / named[1]).read_text()
    assert named[2] in example or textwrap.indent(named[2], "    ") in example


@pytest.mark.parametrize("text", found("toml"))
def test_toml_on_a_how_to_page_has_only_keys_that_there_are(text):
    raw = LEAST | tomllib.loads(text)
    matrix = raw.pop("matrix", {})
    decode(raw, Experiment)
    for key, values in matrix.items():
        for value in values.values() if isinstance(values, dict) else values:
            decode(_with(raw, key.split("."), value), Experiment)


@pytest.mark.parametrize("text", found("sh"))
def test_commands_on_a_how_to_page_are_there(text):
    for line in text.splitlines():
        program, name, *rest = line.split()
        assert program == "pliant"
        assert name in {known for known, _, _ in COMMANDS}
        files = [word for word in rest if word.startswith("experiments/")]
        assert all((ROOT / word).exists() for word in files), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{target} in {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page):
    for named in re.findall(
        r"\b(?:experiments|examples|scripts)/[\w/-]+\.(?:toml|py)", page.read_text()
    ):
        assert (ROOT / named).exists(), f"{named} in {page.name}"


def test_every_page_is_in_the_navigation():
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    listed = re.findall(r"[\w./-]+\.md", str(site["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)
