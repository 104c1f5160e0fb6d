"""The style of figures: lines differ in colour, dash and marker, so that colour is never needed."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant.extras import require
from pliant.storage import atomic

# Dark tones of the Okabe-Ito palette: contrast of at least 3:1 against white, distinct for all
# kinds of colour blindness, and of different lightness for grey print.
COLOURS = ("#0072b2", "#c44e00", "#007a5a", "#a0457e", "#806000", "#1a1a1a", "#4c86d9", "#8a8a8a")
DASHES = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (9, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h", ">")
TEXT_COLOUR = "#1d2733"
WIDTH = 8.6  # inches
COLUMN_WIDTH, MIN_AXES_HEIGHT, LINE_HEIGHT = 3.5, 2.2, 0.21  # inches; a line of a legend
RC_PARAMS = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": TEXT_COLOUR,
    "axes.labelcolor": TEXT_COLOUR,
    "axes.edgecolor": "#66717d",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e7eb",
    "xtick.color": TEXT_COLOUR,
    "ytick.color": TEXT_COLOUR,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "pliant",
}


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """A figure with its text alternative and its numbers."""

    slug: str  # file name without suffix
    title: str
    alt_text: str
    figure: Any
    header: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    conclusion: str = ""  # one sentence, computed from the numbers

    def render(self, file_format: str) -> bytes:
        out = io.BytesIO()
        metadata = {"Date": None} if file_format == "svg" else None  # equal runs, equal bytes
        with _use_rc_params():
            self.figure.savefig(
                out, format=file_format, dpi=150, metadata=metadata, facecolor="white"
            )
        self.figure.set_layout_engine("none")  # layout takes half of the time: do it only once
        return out.getvalue()

    def render_column(self) -> bytes:
        """Return a PDF as wide as a column of a paper; the figure keeps its layout."""
        out, figure = io.BytesIO(), self.figure
        inner = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
        legends = [*inner, *figure.legends]
        lines = sum(len(legend.get_texts()) for legend in [*legends, *figure.legends])
        width, height = figure.get_size_inches()
        height = max(COLUMN_WIDTH * height / width, MIN_AXES_HEIGHT) + LINE_HEIGHT * lines
        figure.set_size_inches(COLUMN_WIDTH, height)
        with _use_rc_params():
            for legend in inner:  # below the axes and their label
                legend.set_loc("upper center")
                legend.set_bbox_to_anchor((0.5, -0.25))
            for legend in list(figure.legends):  # one entry per line
                handles, texts = legend.legend_handles, [t.get_text() for t in legend.get_texts()]
                legend.remove()
                figure.legend(
                    handles, texts, loc="outside lower center", fontsize=8, labelspacing=1.6
                )
            figure.set_layout_engine("constrained")
            figure.savefig(out, format="pdf", metadata={"CreationDate": None}, facecolor="white")
        return out.getvalue()

    def save(self, path: Path) -> Path:
        """Write the image to a file, whose suffix sets the format."""
        atomic.write_bytes(path, self.render(path.suffix.lstrip(".") or "png"))
        return path


def make_figure(height: float, height_ratios: Sequence[float] = (1,)) -> tuple[Any, Any]:
    """Make a figure with axes stacked in these ratios of height."""
    with _use_rc_params():
        figures = require("matplotlib.figure", "report")
        figure = figures.Figure((WIDTH, height), layout="constrained")
        return figure, figure.subplots(len(height_ratios), 1, height_ratios=height_ratios)


def draw_heat_map(
    axes: Any, values: Any, *, vmin: float | None = None, vmax: float | None = None
) -> Any:
    """Draw a matrix with its first row at the bottom, darker where a value is higher."""
    axes.grid(visible=False)
    options = {"aspect": "auto", "origin": "lower", "interpolation": "nearest"}
    return axes.imshow(values, cmap="Blues", vmin=vmin, vmax=vmax, **options)


def _use_rc_params() -> Any:
    return require("matplotlib", "report").rc_context(RC_PARAMS)


def get_line_style(index: int) -> dict[str, Any]:
    """Return the style of the n-th line; 40 of them differ in colour, dash or marker."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def format_csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


MISSING = "\N{EN DASH}"  # shown for a number that is not known


def format_percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.2f} %"


def format_short(value: float) -> str:
    """Format a number with a prefix: 1.2 G, 340 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def format_quantity(value: float, unit: str) -> str:
    """Format a quantity with a prefix: 1.2 GB, 400 MACs."""
    text = format_short(value)
    return f"{text}{unit}" if text[-1].isalpha() else f"{text} {unit}"
