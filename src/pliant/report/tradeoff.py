"""The trade-off of a comparison: accuracy against traffic, with client compute as area."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.extras import need
from pliant.report.history import Floats, Sample
from pliant.report.kinds import SPLIT, Share, kind
from pliant.report.labels import place_labels
from pliant.report.look import TEXT, Drawn, canvas, measured, percent

AREA = 620.0  # points², of the group with most MACs
WIDE = 20.0  # a larger range of traffic is shown by its logarithm
FILL, EDGE, PALE = "#9ecae1", "#0b3c5d", "#66717d"


@dataclass(frozen=True)
class Spot:
    """One group: means over its seeds, with standard deviations."""

    label: str
    is_split: bool
    accuracy: tuple[float, float]
    sent: tuple[float, float]  # bytes, up and down
    macs: tuple[float, float]  # of all clients
    seeds: int
    is_best: bool = False  # no other has all three better, or as good


def spots(samples: Sequence[Sample]) -> list[Spot]:
    """Return where each group stands; those without an evaluation are left out."""
    found = []
    for sample in samples:
        scored = [history for history in sample.histories if history.accuracy is not None]
        if not scored:
            continue
        final = [history.accuracy for history in scored if history.accuracy is not None]
        sent = [history.total("down") + history.total("up") for history in scored]
        macs = [history.total("macs") for history in scored]
        three = _spread(final), _spread(sent), _spread(macs)
        found.append(Spot(sample.label, kind(sample) == SPLIT, *three, len(scored)))
    best = undominated(np.array([[-s.accuracy[0], s.sent[0], s.macs[0]] for s in found]))
    return [
        Spot(s.label, s.is_split, s.accuracy, s.sent, s.macs, s.seeds, bool(of))
        for s, of in zip(found, best, strict=True)
    ]


def _spread(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def undominated(costs: Floats) -> list[bool]:
    """Tell of each row whether no other is as low everywhere and lower somewhere."""
    return [
        not any(bool((other <= row).all() and (other < row).any()) for other in costs)
        for row in costs
    ]


def draw_tradeoff(share: Share) -> Drawn | None:
    """Draw accuracy against traffic, a bubble for each group; None where nothing was sent."""
    found = spots(share.samples)
    if len(found) < 2 or not any(spot.sent[0] for spot in found):
        return None
    figure, axes = canvas(max(4.6, 0.2 * len(found) + 1.6))
    most = max(spot.macs[0] for spot in found) or 1.0
    scale = AREA * min(1.0, 12 / len(found))
    unit, name = (1e9, "GB") if max(spot.sent[0] for spot in found) >= 1e9 else (1e6, "MB")
    for spot in found:
        _bubble(axes, spot, scale * spot.macs[0] / most, unit)
    _axes(axes, found, name)
    _legend(figure, axes, found, lambda macs: scale * macs / most, most)
    boxes = [
        (spot.sent[0] / unit, spot.accuracy[0], float(np.sqrt(scale * spot.macs[0] / most)))
        for spot in found
    ]
    names = [(spot.label, "bold" if spot.is_best else "normal") for spot in found]
    place_labels(figure, axes, boxes, names)
    best = ", ".join(spot.label for spot in found if spot.is_best)
    told = "; ".join(
        f"{spot.label}: {percent(spot.accuracy[0])} for {measured(spot.sent[0], 'B')} and "
        f"{measured(spot.macs[0], 'MACs')}"
        for spot in found
    )
    return Drawn(
        f"trade-off{'-' + share.name.split()[0] if share.name else ''}",
        "Accuracy against traffic and compute" + (f": {share.name}" if share.name else ""),
        "Bubble chart of the last accuracy against bytes sent up and down, means over seeds "
        "with one standard deviation; the area of a bubble is what the clients computed. "
        f"Pareto-optimal in all three (no other group is at least as good in each): {best}. "
        f"{told}.",
        figure,
        (
            "group", "accuracy", "standard deviation", "GB", "standard deviation of GB",
            "client GMACs", "seeds", "Pareto-optimal",
        ),
        [_row(spot) for spot in found],
    )  # fmt: skip


def _row(spot: Spot) -> tuple[object, ...]:
    numbers = (*spot.accuracy, spot.sent[0] / 1e9, spot.sent[1] / 1e9, spot.macs[0] / 1e9)
    rounded = (float(f"{number:.6g}") for number in numbers)
    return (spot.label, *rounded, spot.seeds, "yes" if spot.is_best else "no")


def _bubble(axes: Any, spot: Spot, area: float, unit: float) -> None:
    x, y = spot.sent[0] / unit, spot.accuracy[0]
    if spot.seeds > 1:
        axes.errorbar(
            x, y, xerr=spot.sent[1] / unit, yerr=spot.accuracy[1], fmt="none",
            ecolor=PALE, elinewidth=0.9, capsize=2.5, zorder=2,
        )  # fmt: skip
    axes.scatter([x], [y], **_style(spot, area))
    axes.scatter([x], [y], s=4, color=TEXT, zorder=4)  # seen also where a bubble is tiny


def _style(spot: Spot, area: float) -> dict[str, Any]:
    """Return how a bubble looks: filled if it is among the best, square if it is federated."""
    # matplotlib's areas are those of the box around a marker
    box = area if not spot.is_split else area * 4 / np.pi
    look = {"marker": "o" if spot.is_split else "s", "s": box, "zorder": 3}
    if spot.is_best:
        return look | {"facecolor": FILL, "edgecolor": EDGE, "linewidth": 1.8, "alpha": 0.85}
    return look | {
        "facecolor": "none", "edgecolor": PALE, "linewidth": 1.1, "linestyle": (0, (3, 2)),
    }  # fmt: skip


def _axes(axes: Any, found: list[Spot], unit: str) -> None:
    tickers = need("matplotlib.ticker", "report")
    sent = [spot.sent[0] for spot in found]
    is_wide = min(sent) > 0 and max(sent) / min(sent) > WIDE
    if is_wide:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(tickers.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.14, y=0.14)
    axes.set_xlabel(f"{unit} sent, up and down" + (" (logarithmic)" if is_wide else ""))
    axes.set_ylabel("last test accuracy")
    axes.yaxis.set_major_formatter(tickers.PercentFormatter(1.0))


def _legend(
    figure: Any, axes: Any, found: list[Spot], area: Callable[[float], float], most: float
) -> None:
    """Explain fill, shape and area below the axes."""
    zero = (0.0, 0.0)
    kinds = sorted({spot.is_split for spot in found})

    def sign(is_split: bool, is_best: bool, size: float, label: str) -> Any:
        spot = Spot(label, is_split, zero, zero, zero, 1, is_best)
        return axes.scatter([], [], label=label, **_style(spot, size))

    shape = kinds[-1]
    signs = [
        sign(shape, True, 60, "Pareto-optimal (name in bold)"),
        sign(shape, False, 60, "another is better or equal in all"),
    ]
    if len(kinds) > 1:
        signs += [sign(True, False, 60, "split"), sign(False, False, 60, "federated")]
    signs += [
        sign(shape, False, area(macs), measured(macs, "MACs") + " of clients")
        for macs in (most / 4, most)
    ]
    figure.legend(
        handles=signs, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False,
        borderpad=0.8, labelspacing=1.3, handletextpad=1.0, columnspacing=2.2,
    )  # fmt: skip
