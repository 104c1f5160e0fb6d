"""Render small tables as HTML, for notebooks."""

from collections.abc import Sequence
from html import escape


def make_html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a title and a table below it; without a header, the first column has the names.

    >>> from pliant.html_table import make_html_table
    >>> make_html_table("fleet", (), [("devices", 4)])
    '<p><b>fleet</b></p><table><tbody><tr><th>devices</th><td>4</td></tr></tbody></table>'
    """
    names = "".join(f"<th>{escape(name)}</th>" for name in header)
    head = f"<thead><tr>{names}</tr></thead>" if header else ""
    lines = []
    for first, *others in rows:
        tag = "td" if header else "th"
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in others)
        lines.append(f"<tr><{tag}>{escape(str(first))}</{tag}>{cells}</tr>")
    body = f"<tbody>{''.join(lines)}</tbody>"
    return f"<p><b>{escape(title)}</b></p><table>{head}{body}</table>"
