"""Colours of both pages: text at least 4.5:1 (WCAG 2.2, 1.4.3), lines 3:1 (1.4.11)."""

import re
from importlib.resources import files

import pytest

from pliant.analysis.style import COLOURS, TEXT_COLOUR
from pliant.report.dark import DARK_COLOURS, DARK_LINES, GROUND

DASHBOARD = files("pliant.dashboard").joinpath("static", "app.css").read_text()
REPORT = files("pliant.report").joinpath("page.css").read_text()


def parse_themes(css):
    """Return the colours of each block of variables."""
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", css)
    themes = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", block)) for block in blocks]
    return [theme for theme in themes if theme]


def compute_luminance(colour):
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def compute_contrast(a, b):
    low, high = sorted((compute_luminance(a), compute_luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_is_that_of_the_standard():
    assert compute_contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert compute_contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_both_pages_have_a_light_and_a_dark_theme():
    light, system_dark, chosen_dark = parse_themes(DASHBOARD)
    assert system_dark == chosen_dark != light
    assert len(parse_themes(REPORT)) == 2


@pytest.mark.parametrize("theme", [*parse_themes(DASHBOARD), *parse_themes(REPORT)], ids=str)
def test_text_is_readable(theme):
    grounds = [theme[name] for name in ("ground", "panel", "selected") if name in theme]
    for name in ("text", "faint", "accent", "bad", "good"):
        for ground in grounds if name in theme else ():
            assert compute_contrast(theme[name], ground) >= 4.5, (name, ground)
    assert compute_contrast(theme["panel"], theme["text"]) >= 4.5  # the tooltip inverts both


@pytest.mark.parametrize("theme", parse_themes(DASHBOARD), ids=["light", "dark", "chosen"])
def test_lines_stand_out(theme):
    for number in range(8):
        for ground in (theme["panel"], theme["selected"]):
            assert compute_contrast(theme[f"line-{number}"], ground) >= 3.0, number


def test_dark_figures_stand_out_and_lines_have_the_colours_of_the_dashboard():
    light, dark, _ = parse_themes(DASHBOARD)
    assert [light[f"line-{number}"] for number in range(8)] == list(COLOURS)
    assert [dark[f"line-{number}"] for number in range(8)] == list(DARK_LINES)
    assert all(compute_contrast(colour, GROUND) >= 3.0 for colour in DARK_LINES)
    assert compute_contrast(DARK_COLOURS[TEXT_COLOUR], GROUND) >= 4.5
    assert f"figure {{ background: {GROUND}; }}" in REPORT


def test_figures_of_the_report_stand_out_on_white():
    assert compute_contrast(TEXT_COLOUR, "#ffffff") >= 4.5
    assert all(compute_contrast(colour, "#ffffff") >= 3.0 for colour in COLOURS)
