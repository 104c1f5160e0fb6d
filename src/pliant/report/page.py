"""The page of a report: one HTML file with everything in it, readable without its neighbours."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from pliant.report.look import Drawn

ROWS = 400  # of a table on the page; the CSV has all


def table(head: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> str:
    """Write a table; a long one ends with how many rows were left out."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = [
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows[:ROWS]
    ]
    more = len(rows) - ROWS
    note = f'<p class="faint">{more:,} more rows are in the CSV file.</p>' if more > 0 else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{note}"
    )


def section(drawn: Drawn, picture: bytes) -> str:
    """Write a figure: its picture as SVG, what it says in words, its numbers, its files."""
    image = b64encode(picture).decode()
    links = ", ".join(
        f'<a href="{drawn.slug}.{kind}" download>{kind.upper()}</a>'
        for kind in ("png", "svg", "csv")
    )
    return (
        f'<section id="{drawn.slug}"><h2>{escape(drawn.title)}</h2>'
        f'<figure><img src="data:image/svg+xml;base64,{image}" alt="{escape(drawn.told)}"></figure>'
        f"<details><summary>In words and numbers</summary><p>{escape(drawn.told)}</p>"
        f"{table(drawn.head, drawn.rows, drawn.title)}</details>"
        f'<p class="faint">Beside this page: {links}</p></section>'
    )


def part(slug: str, title: str, body: str) -> tuple[str, str, str]:
    """Return a section that is not a figure, for `page`."""
    return slug, title, f'<section id="{slug}"><h2>{escape(title)}</h2>{body}</section>'


def figure_part(drawn: Drawn, picture: bytes) -> tuple[str, str, str]:
    """Return the section of a figure, for `page`."""
    return drawn.slug, drawn.title, section(drawn, picture)


def page(title: str, told: str, parts: Sequence[tuple[str, str, str]], foot: str) -> str:
    """Write the whole page."""
    style = files("pliant.report").joinpath("page.css").read_text()
    links = "".join(f'<li><a href="#{slug}">{escape(name)}</a></li>' for slug, name, _ in parts)
    body = "\n".join(text for _, _, text in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{style}</style></head>"
        f"<body><header><h1>{escape(title)}</h1><p>{escape(told)}</p></header>"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav><main>{body}</main>'
        f'<footer><p class="faint">{escape(foot)}</p></footer></body></html>\n'
    )
