"""Place labels beside the points of a figure so that none covers another label or a point."""

from collections.abc import Sequence
from math import cos, pi, sin
from typing import Any

from pliant.analysis.style import TEXT_COLOUR
from pliant.extras import require

FONT_SIZE = 8.0  # points
GAP = 3.0  # points between a marker's edge and its label
ANGLES = tuple(pi * turn / 8 for turn in (0, 8, 1, 15, 7, 9, 2, 14, 4, 12, 3, 13, 5, 11, 6, 10))
RINGS = (0.0, 6.0, 14.0, 24.0, 36.0, 50.0, 66.0, 84.0)

Pair = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top, in points


def place_labels(
    axes: Any, points: Sequence[tuple[float, float, float]], labels: Sequence[tuple[str, str]]
) -> None:
    """Write each label (text, weight) near its point (x, y, diameter in points).

    Each label takes the nearest free position, first come, first served.
    """
    figure = axes.figure
    canvas = require("matplotlib.backends.backend_agg", "report").FigureCanvasAgg(figure)
    canvas.draw()  # fixes the layout, so that positions can be measured
    figure.set_layout_engine("none")
    unit = 72 / figure.dpi  # points per pixel
    frame = axes.get_window_extent()
    bounds = (frame.x0 * unit, frame.y0 * unit, frame.x1 * unit, frame.y1 * unit)
    pixels = axes.transData.transform([(x, y) for x, y, _ in points])
    centres = [(x * unit, y * unit) for x, y in pixels]
    effects = require("matplotlib.patheffects", "report")
    halo = [effects.withStroke(linewidth=2.2, foreground="white")]  # over grid and error bars
    occupied: list[Box] = [
        (x - d / 2, y - d / 2, x + d / 2, y + d / 2)
        for (x, y), (_, _, d) in zip(centres, points, strict=True)
    ]
    for centre, point, (text, weight) in zip(centres, points, labels, strict=True):
        label = axes.annotate(
            text, point[:2], (0, 0), textcoords="offset points", fontsize=FONT_SIZE,
            fontweight=weight, color=TEXT_COLOUR, zorder=6, ha="center", va="center_baseline",
            path_effects=halo,
        )  # fmt: skip
        extent = label.get_window_extent(canvas.get_renderer())
        size = extent.width * unit, extent.height * unit
        shift, ring, box = _find_free_shift(centre, point[2] / 2, size, occupied, bounds)
        occupied.append(box)
        label.set_position(shift)
        if ring:  # a label this far away needs a line to its point
            stroke = {"arrowstyle": "-", "color": "#66717d", "linewidth": 0.7, "shrinkA": 0.0}
            axes.annotate(
                "", point[:2], _find_line_end(shift, size), textcoords="offset points", zorder=5,
                arrowprops=stroke | {"shrinkB": point[2] / 2},
            )  # fmt: skip


def _find_free_shift(
    centre: Pair, radius: float, size: Pair, occupied: list[Box], bounds: Box
) -> tuple[Pair, float, Box]:
    """Return the shift to the nearest free position; where none is free, to the least covered."""
    left, bottom, right, top = bounds
    best: tuple[float, Pair, float, Box] | None = None
    for ring in RINGS:
        for angle in ANGLES:
            distance = radius + GAP + ring
            shift = cos(angle) * (distance + size[0] / 2), sin(angle) * (distance + size[1] / 2)
            x, y = centre[0] + shift[0], centre[1] + shift[1]
            box = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            beyond = (left - box[0], bottom - box[1], box[2] - right, box[3] - top)
            overhang = sum(max(0.0, distance) for distance in beyond)
            penalty = sum(_compute_overlap(box, other) for other in occupied) + 100 * overhang
            if penalty == 0:
                return shift, ring, box
            if best is None or penalty < best[0]:
                best = penalty, shift, ring, box
    assert best is not None
    return best[1:]


def _compute_overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


def _find_line_end(shift: Pair, size: Pair) -> Pair:
    """Return where a line from the point meets the label's box."""
    x, y = shift
    factor = max(abs(x) / (size[0] / 2), abs(y) / (size[1] / 2), 1e-9)
    return x - x / factor, y - y / factor
