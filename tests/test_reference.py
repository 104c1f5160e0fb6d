"""docs/reference.md matches the code."""

import importlib.util
import re
from pathlib import Path

import pytest

import pliant
from pliant.cli import COMMANDS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(script):
    return script.make_page()


def test_the_page_is_up_to_date(script, page):
    assert script.PAGE.read_text() == page, f"run `{script.COMMAND}`"


def test_every_public_name_and_every_command_has_a_section(page):
    sections = set(re.findall(r"^### (.+)$", page, re.MULTILINE))
    assert sections >= set(pliant._read_exports())
    assert sections >= {f"pliant {name}" for name, _, _ in COMMANDS}


def test_a_field_is_listed_with_its_type_default_and_comment(page):
    assert "| `mu` | `NonNegative` | `0.01` |" in page
    assert (
        "| `tau` | `Positive` | `0.001` | degree of adaptivity; smaller is more adaptive |" in page
    )
    assert "| `--seed` | `0` |" in page


def test_the_page_is_reproducible(page):
    assert " at 0x" not in page
    assert str(ROOT) not in page
