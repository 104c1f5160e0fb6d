"""How figures look: told apart by colour, by line style and by marker, also without colour."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pliant.extras import need

# Dark tones of the palette of Okabe and Ito: at least 3:1 against white, and apart for all kinds
# of colour blindness. Their lightness differs too, so that they stay apart in print.
COLOURS = (
    "#0072b2",
    "#c44e00",
    "#007a5a",
    "#a0457e",
    "#806000",
    "#1a1a1a",
    "#4c86d9",
    "#8a8a8a",
)
DASHES = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (9, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h", ">")
TEXT = "#1d2733"
SHADES = "Blues"  # of heat maps: lightness alone tells the value
WIDTH = 8.6  # inches, of every figure
SETTINGS = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "#66717d",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e7eb",
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "pliant",
}


@dataclass(frozen=True, eq=False)
class Drawn:
    """A figure with its words and its numbers: what it shows must be there for everyone."""

    slug: str  # of its files
    title: str
    told: str  # the text alternative
    figure: Any
    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]

    def csv(self) -> str:
        """Return its numbers as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.head)
        writer.writerows(self.rows)
        return text.getvalue()

    def image(self, kind: str) -> bytes:
        """Return its picture, as svg or png."""
        out = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None  # the same run, the same bytes
        with _settings():
            self.figure.savefig(out, format=kind, dpi=150, metadata=metadata, facecolor="white")
        self.figure.set_layout_engine("none")  # laid out now, and that takes half of the time
        return out.getvalue()


def canvas(height: float, shares: Sequence[float] = (1,)) -> tuple[Any, Any]:
    """Make a figure and its axes, one above the other with these shares of the height."""
    with _settings():
        figure = need("matplotlib.figure", "report").Figure((WIDTH, height), layout="constrained")
        return figure, figure.subplots(len(shares), 1, height_ratios=shares)


def _settings() -> Any:
    return need("matplotlib", "report").rc_context(SETTINGS)


def line(number: int) -> dict[str, Any]:
    """Return how the line of this number is drawn; 40 of them differ in colour, dash or marker."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


NONE = "\N{EN DASH}"  # in the place of a number that is not there


def percent(value: float | None) -> str:
    """Write a share as a percentage."""
    return NONE if value is None else f"{100 * value:.2f} %"


def short(value: float) -> str:
    """Write a number with a prefix: 1.2 G, 340 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def measured(value: float, unit: str) -> str:
    """Write a quantity with a prefix: 1.2 GB, 400 MACs."""
    text = short(value)
    return f"{text}{unit}" if text[-1].isalpha() else f"{text} {unit}"
