"""Names beside the points of a figure, placed so that none covers another or a point."""

from collections.abc import Sequence
from math import cos, pi, sin
from typing import Any

from pliant.extras import need
from pliant.report.look import TEXT

SIZE = 8.0  # points, of a name
GAP = 3.0  # points between a point's edge and its name
ANGLES = tuple(pi * turn / 8 for turn in (0, 8, 1, 15, 7, 9, 2, 14, 4, 12, 3, 13, 5, 11, 6, 10))
RINGS = (0.0, 6.0, 14.0, 24.0, 36.0, 50.0, 66.0, 84.0)

Box = tuple[float, float, float, float]  # left, bottom, right, top, in points


def place_labels(
    figure: Any,
    axes: Any,
    points: Sequence[tuple[float, float, float]],
    names: Sequence[tuple[str, str]],
) -> None:
    """Write each name (text, weight) near its point (x, y, diameter in points).

    Each takes the nearest place that is free, in the order given.
    """
    renderer = need("matplotlib.backends.backend_agg", "report").FigureCanvasAgg(figure)
    renderer.draw()  # the layout has to stand before places can be measured
    figure.set_layout_engine("none")
    unit = 72 / figure.dpi  # from pixels
    frame = axes.get_window_extent()
    inside = (frame.x0 * unit, frame.y0 * unit, frame.x1 * unit, frame.y1 * unit)
    at = [(x * unit, y * unit) for x, y in axes.transData.transform([(p[0], p[1]) for p in points])]
    effects = need("matplotlib.patheffects", "report")
    halo = [effects.withStroke(linewidth=2.2, foreground="white")]  # over grid and error bars
    taken: list[Box] = [
        (x - d / 2, y - d / 2, x + d / 2, y + d / 2)
        for (x, y), (_, _, d) in zip(at, points, strict=True)
    ]
    for (x, y), point, (text, weight) in zip(at, points, names, strict=True):
        written = axes.annotate(
            text, point[:2], (0, 0), textcoords="offset points", fontsize=SIZE,
            fontweight=weight, color=TEXT, zorder=6, ha="center", va="center_baseline",
            path_effects=halo,
        )  # fmt: skip
        extent = written.get_window_extent(renderer.get_renderer())
        size = extent.width * unit, extent.height * unit
        shift, ring, box = _free((x, y), point[2] / 2, size, taken, inside)
        taken.append(box)
        written.set_position(shift)
        if ring:  # too far to be clear by itself
            stroke = {"arrowstyle": "-", "color": "#66717d", "linewidth": 0.7, "shrinkA": 0.0}
            axes.annotate(
                "", point[:2], _towards(shift, size), textcoords="offset points", zorder=5,
                arrowprops=stroke | {"shrinkB": point[2] / 2},
            )  # fmt: skip


def _free(
    centre: tuple[float, float],
    radius: float,
    size: tuple[float, float],
    taken: list[Box],
    inside: Box,
) -> tuple[tuple[float, float], float, Box]:
    """Return the shift of the nearest free place; where none is free, the least covered one."""
    best: tuple[float, tuple[float, float], float, Box] | None = None
    for ring in RINGS:
        for angle in ANGLES:
            reach = radius + GAP + ring
            shift = (
                cos(angle) * (reach + size[0] / 2),
                sin(angle) * (reach + size[1] / 2),
            )
            x, y = centre[0] + shift[0], centre[1] + shift[1]
            box = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            out = sum(
                (
                    max(0.0, inside[0] - box[0]), max(0.0, inside[1] - box[1]),
                    max(0.0, box[2] - inside[2]), max(0.0, box[3] - inside[3]),
                )
            )  # fmt: skip
            covered = sum(_overlap(box, other) for other in taken) + 100 * out
            if covered == 0:
                return shift, ring, box
            if best is None or covered < best[0]:
                best = covered, shift, ring, box
    assert best is not None
    return best[1:]


def _overlap(one: Box, other: Box) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0


def _towards(shift: tuple[float, float], size: tuple[float, float]) -> tuple[float, float]:
    """Return where a line from the point meets the box of the name."""
    x, y = shift
    steep = max(abs(x) / (size[0] / 2), abs(y) / (size[1] / 2), 1e-9)
    return x - x / steep, y - y / steep
