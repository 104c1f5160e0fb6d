"""Draw how much of the devices' compute was useful, wasted or unused."""

from pliant.analysis.runs import RunGroup
from pliant.analysis.style import ReportFigure, format_percent, make_figure
from pliant.extras import require

BAR_SEGMENTS = (
    ("useful", "#0072b2", ""),
    ("wasted", "#e8a34c", "////"),
    ("unused", "#eef1f4", "...."),
)


def compute_utilisation(group: RunGroup) -> tuple[float, float, float] | None:
    """Return which shares of the devices' MACs were useful, wasted and unused."""
    useful, spent, available = map(group.total, ("useful", "macs", "available"))
    if not available:
        return None
    useful_share = useful / available
    wasted_share = max(0.0, spent - useful) / available
    return useful_share, wasted_share, max(0.0, 1 - useful_share - wasted_share)


def draw_utilisation(groups: list[RunGroup]) -> ReportFigure | None:
    """Draw how the MACs available to the devices of each group were used."""
    tickers = require("matplotlib.ticker", "report")
    all_bars = [(group.label, compute_utilisation(group)) for group in groups]
    bars = [(label, shares) for label, shares in all_bars if shares is not None]
    if not bars:
        return None
    figure, axes = make_figure(1.3 + 0.32 * len(bars))
    for y, (_, shares) in enumerate(bars):
        left = 0.0
        for (name, colour, hatch), share in zip(BAR_SEGMENTS, shares, strict=True):
            axes.barh(
                y, share, left=left, color=colour, hatch=hatch, edgecolor="#1d2733",
                linewidth=0.6, height=0.66, label=name if y == 0 else None,
            )  # fmt: skip
            left += share
        if shares[0] > 0.08:
            axes.text(0.01, y, format_percent(shares[0]), va="center", color="white", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(tickers.PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the MACs that the selected devices could have done")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    summary = "; ".join(
        f"{label}: {format_percent(shares[0])} useful, {format_percent(shares[1])} wasted"
        for label, shares in bars
    )
    return ReportFigure(
        "utilisation",
        "Use of the devices' compute",
        f"Bar chart of the shares of available MACs by group. {summary}.",
        figure,
        ("group", *(name for name, _, _ in BAR_SEGMENTS)),
        [(label, *(round(share, 6) for share in shares)) for label, shares in bars],
        _conclude(bars),
    )


def _conclude(bars: list[tuple[str, tuple[float, float, float]]]) -> str:
    (most, high), (least, low) = (choose(bars, key=lambda bar: bar[1][0]) for choose in (max, min))
    text = f"{most} used {high[0]:.0%} of the compute that its devices had"
    return f"{text}." if most == least else f"{text}, {least} {low[0]:.0%}."
