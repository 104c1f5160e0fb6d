"""The style of figures: lines differ in colour, dash and marker, so that colour is never needed."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from pliant.extras import require
from pliant.storage import atomic

# Dark tones of the Okabe-Ito palette: contrast of at least 3:1 against white, distinct for all
# kinds of colour blindness, and of different lightness for grey print.
COLOURS = ("#0072b2", "#c44e00", "#007a5a", "#a0457e", "#806000", "#1a1a1a", "#3f7ad0", "#767676")
DASHES = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (9, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h", ">")
TEXT_COLOUR = "#1d2733"
EDGE_COLOUR = "#fdfdfd"  # between bars: not white, because the edge of a dark bar is not dark
WIDTH = 8.6  # inches
COLUMN_WIDTH, MIN_AXES_HEIGHT, LINE_HEIGHT = 3.5, 2.2, 0.21  # inches; a line of a legend
LEGEND_OFFSET, LABEL_LINE_HEIGHT = 0.4, 0.15  # inches below the axes; a line of a label
X_LABEL_CHARACTERS, Y_LABEL_CHARACTERS = 32, 20  # per line, at the width of a column
TITLE_CHARACTERS, MAX_COLUMN_TICKS = 44, 8
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
        # equal runs, equal bytes
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format)
        with _use_rc_params():
            self.figure.savefig(
                out, format=file_format, dpi=150, metadata=metadata, facecolor="white"
            )
        self.figure.set_layout_engine("none")  # layout takes half of the time: do it only once
        return out.getvalue()

    def render_column(self) -> dict[str, bytes]:
        """Return PDF and SVG as wide as a column of a paper; the figure keeps its layout."""
        figure = self.figure
        inner = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
        legends = [*inner, *figure.legends]
        lines = sum(len(legend.get_texts()) for legend in [*legends, *figure.legends])
        width, height = figure.get_size_inches()
        panels = max(1, len(inner))
        height = max(COLUMN_WIDTH * height / width, MIN_AXES_HEIGHT * panels) + LINE_HEIGHT * lines
        figure.set_size_inches(COLUMN_WIDTH, height)
        for axes in figure.axes:
            if title := axes.get_title("left"):
                axes.set_title(fill(title, TITLE_CHARACTERS), loc="left", fontsize=8.5)
            if axes.images and len(axes.get_xticks()) > MAX_COLUMN_TICKS:  # of a heat map
                axes.set_xticks(axes.get_xticks()[::2])
            axes.set_xlabel(fill(axes.get_xlabel(), X_LABEL_CHARACTERS))
            axes.set_ylabel(fill(axes.get_ylabel(), Y_LABEL_CHARACTERS))
        with _use_rc_params():
            for legend in inner:
                _move_below(legend)
            for legend in list(figure.legends):  # one entry per line
                handles, texts = legend.legend_handles, [t.get_text() for t in legend.get_texts()]
                legend.remove()
                figure.legend(
                    handles, texts, loc="outside lower center", fontsize=8, labelspacing=1.6,
                    borderpad=1.2, handletextpad=1.8,
                )  # fmt: skip
            figure.set_layout_engine("constrained")
        return {kind: self.render(kind) for kind in ("pdf", "svg")}

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


def _move_below(legend: Any) -> None:
    """Move the legend of some axes below their ticks and their label."""
    transforms = require("matplotlib.transforms", "report")
    axes, scale = legend.axes, legend.figure.dpi_scale_trans
    offset = LEGEND_OFFSET + LABEL_LINE_HEIGHT * axes.get_xlabel().count("\n")
    legend.set_loc("upper center")
    below = axes.transAxes + transforms.ScaledTranslation(0, -offset, scale)
    legend.set_bbox_to_anchor((0.5, 0.0), transform=below)


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
