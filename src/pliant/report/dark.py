"""Dark variants of figures: a style inside the SVG that a dark page applies."""

from pliant.analysis.style import COLOURS, EDGE_COLOUR, TEXT_COLOUR

GROUND = "#191f26"
DARK_LINES = (
    "#56b4e9", "#f0894a", "#2fc79b", "#e59cc5", "#e9c46a", "#f2f2f2", "#8fb3ff", "#9aa5b0",
)  # fmt: skip
# Colours of fills and lines in figures, and what a dark page shows instead. Scales of colour stay:
# their legend is in the figure.
DARK_COLOURS = dict(zip(COLOURS, DARK_LINES, strict=True)) | {
    "#ffffff": GROUND,
    "#000000": "#e8ecf0",
    TEXT_COLOUR: "#e8ecf0",
    EDGE_COLOUR: "#77838f",
    "#66717d": "#9aa5b0",  # axes and faint lines
    "#e3e7eb": "#333e49",  # grid
    "#eef1f4": "#2a343e",  # compute that was not used
    "#9ecae1": "#24567a",  # filled bubbles
    "#0b3c5d": "#7cc4f5",  # their edges
    "#b00020": "#ff8a9a",  # lost tasks
}


def add_dark_style(svg: bytes) -> bytes:
    """Return a figure of matplotlib that is dark where the page is."""
    rules = "".join(
        f'[style*="{kind}: {light}"],[{kind}="{light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK_COLOURS.items()
        for kind in ("fill", "stroke")
    )
    rules += f'[id^="text_"]{{fill:{DARK_COLOURS[TEXT_COLOUR]}}}'  # black texts have no style
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    start = svg.index(b">", svg.index(b"<svg")) + 1
    return svg[:start] + style.encode() + svg[start:]
