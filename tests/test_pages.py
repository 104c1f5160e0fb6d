"""The pages under docs/ agree with the code: excerpts, keys, commands, links."""

import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from pliant.cli import COMMANDS
from pliant.experiment.config import Experiment, resolve_paths
from pliant.experiment.sweep import _set_value
from pliant.value import decode

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"# (examples/\w+\.py)\n(.*)", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MINIMAL = {"method": {"type": "fedavg"}, "fleet": {"size": 3}}


def list_blocks(kind, folder="howto"):
    pages = [page for page in PAGES if page.parent.name == folder]
    return [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in pages
        for number, (language, text) in enumerate(BLOCK.findall(page.read_text()))
        if language == kind
    ]


@pytest.mark.parametrize("text", list_blocks("python"))
def test_python_on_a_how_to_page_is_part_of_an_example(text):
    excerpt = EXCERPT.match(text)
    assert excerpt, "expected the name of an example in the first line"
    example = (ROOT / excerpt[1]).read_text()
    assert excerpt[2] in example or textwrap.indent(excerpt[2], "    ") in example


@pytest.mark.parametrize("text", list_blocks("toml"))
def test_toml_on_a_how_to_page_has_only_known_keys(text):
    raw = resolve_paths(MINIMAL | tomllib.loads(text), ROOT)
    matrix = raw.pop("matrix", {})
    decode(raw, Experiment)
    for key, values in matrix.items():
        for value in values.values() if isinstance(values, dict) else values:
            decode(_set_value(raw, key.split("."), value), Experiment)


@pytest.mark.parametrize("text", list_blocks("sh"))
def test_commands_on_a_how_to_page_exist(text):
    for line in text.splitlines():
        program, name, *rest = line.split()
        assert program == "pliant"
        assert name in {known for known, _, _ in COMMANDS}
        files = [word for word in rest if word.startswith("experiments/")]
        assert all((ROOT / word).exists() for word in files), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page):
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{target} in {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_on_a_page_exist(page):
    for path in re.findall(
        r"\b(?:experiments|examples|scripts)/[\w/-]+\.(?:toml|py)", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{path} in {page.name}"


def test_every_page_is_in_the_navigation():
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    listed = re.findall(r"[\w./-]+\.md", str(site["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)
