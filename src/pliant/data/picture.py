"""The picture of a partition: how many images of each class every device has."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pliant import atomic
from pliant.data.partition import Shares
from pliant.extras import need


def class_counts(shares: Shares, labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return the table (device, class) of image counts."""
    return np.stack([np.bincount(labels[share], minlength=classes) for share in shares])


def draw_shares(
    path: Path, shares: Shares, labels: NDArray[np.int64], classes: int, *, title: str = ""
) -> Path:
    """Draw sizes and classes of all devices; the suffix (.png, .svg, .pdf) chooses the format."""
    figures = need("matplotlib.figure", "report")
    tickers = need("matplotlib.ticker", "report")
    counts = class_counts(shares, labels, classes)
    devices = len(counts)
    figure = figures.Figure(figsize=(9.0, 3.2 + min(classes, 60) * 0.1), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    above.bar(np.arange(devices), counts.sum(axis=1), width=1.0, color="#4c6a92", linewidth=0)
    above.set_ylabel("images")
    above.spines[["top", "right"]].set_visible(False)
    above.set_title(title, fontsize=8, loc="left")
    drawn = below.imshow(
        counts.T, aspect="auto", interpolation="nearest", cmap="Blues", origin="lower"
    )
    below.set_xlabel("device")
    below.set_ylabel("class")
    below.set_xlim(-0.5, devices - 0.5)
    for axis in (below.xaxis, below.yaxis):
        axis.set_major_locator(tickers.MaxNLocator(nbins=12, integer=True))
    figure.colorbar(drawn, ax=below, label="images", pad=0.01)
    with atomic.replacing(path) as file:
        figure.savefig(file, format=path.suffix.lstrip(".") or "png", dpi=130)
    return path
