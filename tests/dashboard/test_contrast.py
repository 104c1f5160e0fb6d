"""Colours of both pages: text at least 4.5:1 (WCAG 2.2, 1.4.3), lines 3:1 (1.4.11)."""

import re
from importlib.resources import files

import pytest

from pliant.report.look import COLOURS, TEXT

DASH = files("pliant.dashboard").joinpath("static", "app.css").read_text()
REPORT = files("pliant.report").joinpath("page.css").read_text()


def themes(text):
    """Return the colours of each block of variables."""
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", text)
    found = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", block)) for block in blocks]
    return [block for block in found if block]


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_both_pages_have_a_light_and_a_dark_theme():
    assert len(themes(DASH)) == 3  # light, dark by the system, dark by choice
    assert themes(DASH)[1] == themes(DASH)[2]
    assert len(themes(REPORT)) == 2


@pytest.mark.parametrize("theme", [*themes(DASH), *themes(REPORT)], ids=str)
def test_text_is_readable(theme):
    grounds = [theme[name] for name in ("ground", "panel", "chosen") if name in theme]
    for name in ("text", "faint", "accent", "bad", "good"):
        for ground in grounds if name in theme else ():
            assert contrast(theme[name], ground) >= 4.5, (name, ground)
    assert contrast(theme["panel"], theme["text"]) >= 4.5  # the tip is set the other way round


@pytest.mark.parametrize("theme", themes(DASH), ids=["light", "dark", "chosen"])
def test_lines_stand_out(theme):
    for number in range(8):
        for ground in (theme["panel"], theme["chosen"]):
            assert contrast(theme[f"line-{number}"], ground) >= 3.0, number


def test_figures_of_the_report_stand_out_on_white():
    assert contrast(TEXT, "#ffffff") >= 4.5
    assert all(contrast(colour, "#ffffff") >= 3.0 for colour in COLOURS)
