"""How well devices were used, and how their tasks ended."""

from pliant.extras import need
from pliant.report.history import Sample
from pliant.report.look import Drawn, canvas, percent

PARTS = (
    ("useful", "#0072b2", ""),
    ("spent in vain", "#e8a34c", "////"),
    ("not used", "#eef1f4", "...."),
)


def shares(sample: Sample) -> tuple[float, float, float] | None:
    """Return which shares of the devices' MACs were useful, spent in vain and not used."""
    useful = sum(history.total("useful") for history in sample.histories)
    spent = sum(history.total("macs") for history in sample.histories)
    available = sum(history.total("available") for history in sample.histories)
    if not available:
        return None
    used = useful / available
    vain = max(0.0, spent - useful) / available
    return used, vain, max(0.0, 1 - used - vain)


def draw_use(samples: list[Sample]) -> Drawn | None:
    """Draw what became of the MACs that the devices of each group had."""
    tickers = need("matplotlib.ticker", "report")
    found = [(sample.label, shares(sample)) for sample in samples]
    bars = [(label, three) for label, three in found if three is not None]
    if not bars:
        return None
    figure, axes = canvas(1.3 + 0.32 * len(bars))
    for at, (_, three) in enumerate(bars):
        left = 0.0
        for (name, colour, hatch), share in zip(PARTS, three, strict=True):
            label = name if at == 0 else None
            axes.barh(
                at, share, left=left, color=colour, hatch=hatch, edgecolor="#1d2733",
                linewidth=0.6, height=0.66, label=label,
            )  # fmt: skip
            left += share
        if three[0] > 0.08:
            axes.text(0.01, at, percent(three[0]), va="center", color="white", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(tickers.PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the MACs that the selected devices could have done")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    told = "; ".join(
        f"{label}: {percent(three[0])} useful, {percent(three[1])} in vain" for label, three in bars
    )
    return Drawn(
        "utilisation",
        "What became of the devices' compute",
        f"Bar chart of the shares of available MACs by group. {told}.",
        figure,
        ("group", "useful", "spent in vain", "not used"),
        [(label, *(round(share, 6) for share in three)) for label, three in bars],
    )
