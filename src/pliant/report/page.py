"""Render the page of a report as one self-contained HTML file."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from pliant.analysis.style import ReportFigure

MAX_ROWS = 400  # per table on the page; the CSV has all
Section = tuple[str, str, str]  # slug, title and HTML


def render_table(header: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> str:
    """Return a table as HTML, with a note on rows that were left out."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    lines = [
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows[:MAX_ROWS]
    ]
    more = len(rows) - MAX_ROWS
    note = f'<p class="faint">{more:,} more rows are in the CSV file.</p>' if more > 0 else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{note}"
    )


def make_figure_section(figure: ReportFigure, svg: bytes) -> Section:
    """Return the section of a figure: its image, text alternative, numbers and files."""
    image, text = b64encode(svg).decode(), escape(figure.alt_text)
    links = ", ".join(
        f'<a href="{figure.slug}.{kind}" download>{kind.upper()}</a>'
        for kind in ("png", "svg", "pdf", "csv")
    )
    conclusion = f"<p><strong>{escape(figure.conclusion)}</strong></p>" * bool(figure.conclusion)
    return make_section(
        figure.slug,
        figure.title,
        f'{conclusion}<figure tabindex="0" role="group" aria-label="{escape(figure.title)}">'
        f'<img src="data:image/svg+xml;base64,{image}" alt="{text}"></figure>'
        f"<details><summary>In words and numbers</summary><p>{text}</p>"
        f"{render_table(figure.header, figure.rows, figure.title)}</details>"
        f'<p class="faint">Beside this page: {links}</p>',
    )


def make_section(slug: str, title: str, body: str) -> Section:
    return slug, title, f'<section id="{slug}"><h2>{escape(title)}</h2>{body}</section>'


def fold_section(section: Section) -> Section:
    """Return a section that shows only its title until it is opened, by a link too."""
    slug, title, text = section
    heading = f"<h2>{escape(title)}</h2>"
    body = text.removeprefix(f'<section id="{slug}">{heading}').removesuffix("</section>")
    # the anchor is inside, so that browsers open what a link leads to
    folded = f'<details><summary>{heading}</summary><div id="{slug}">{body}</div></details>'
    return slug, title, f"<section>{folded}</section>"


def render_page(title: str, description: str, sections: Sequence[Section], footer: str) -> str:
    style = files("pliant.report").joinpath("page.css").read_text()
    links = "".join(f'<li><a href="#{slug}">{escape(name)}</a></li>' for slug, name, _ in sections)
    body = "\n".join(text for _, _, text in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{style}</style></head>"
        f"<body><header><h1>{escape(title)}</h1><p>{escape(description)}</p></header>"
        f'<nav aria-label="Contents"><details><summary>Contents</summary><ul>{links}</ul>'
        f"</details></nav><main>{body}</main>"
        f'<footer><p class="faint">{escape(footer)}</p></footer></body></html>\n'
    )
