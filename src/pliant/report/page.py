"""Render the page of a report as one self-contained HTML file."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from pliant.analysis.style import ReportFigure
from pliant.report.dark import add_dark_style

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


def make_figure_section(figure: ReportFigure, wide: bytes, narrow: bytes) -> Section:
    """Return the section of a figure: its two images, text alternative, numbers and files."""
    text = escape(figure.alt_text)
    conclusion = f"<p><strong>{escape(figure.conclusion)}</strong></p>" * bool(figure.conclusion)
    image = (
        f'<picture><source media="(max-width: 40rem)" srcset="{_embed(narrow)}">'
        f'<img src="{_embed(wide)}" alt="{text}"></picture>'
    )
    files = (("PNG", ".png"), ("SVG", ".svg"), ("CSV", ".csv"))
    narrow_files = (("PDF", ".pdf"), ("SVG", "-column.svg"))
    return make_section(
        figure.slug,
        figure.title,
        f'{conclusion}<figure tabindex="0" role="group" aria-label="{escape(figure.title)}">'
        f"{image}</figure>"
        f"<details><summary>In words, numbers and files</summary>"
        f"<p>{_link(figure.slug, files)}; as wide as a column of a paper: "
        f"{_link(figure.slug, narrow_files)}</p><p>{text}</p>"
        f"{render_table(figure.header, figure.rows, figure.title)}</details>",
    )


def _embed(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{b64encode(add_dark_style(svg)).decode()}"


def _link(slug: str, files: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f'<a href="{slug}{end}" download>{kind}</a>' for kind, end in files)


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
