"""Show the data of devices: how many images of each class every device has."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pliant.analysis.runs import RunFolder
from pliant.analysis.style import ReportFigure, draw_heat_map, make_figure

if TYPE_CHECKING:  # torch is slow to import
    from pliant.data.federated import FederatedData

MAX_TICKS = 12


@dataclass(frozen=True, eq=False)
class DataOverview:
    """The data of a run's devices, and the costs of its table rows."""

    class_counts: NDArray[np.int64]  # (device, class)
    description: str
    row_shares: tuple[float, ...] | None  # None if the method has no table


def load_data_overview(run: RunFolder) -> DataOverview | None:
    """Rebuild the data and the network of a run from its config; None if that fails."""
    from pliant.data.partition import class_counts
    from pliant.engine.worker_context import build_context
    from pliant.experiment.build import build_experiment
    from pliant.experiment.config import load_run_config
    from pliant.methods.verbs import get_inner_method
    from pliant.split import AnySplit

    try:
        experiment = load_run_config(run.folder)
        net, data = build_experiment(experiment)
    except (ValueError, LookupError, OSError):
        return None
    counts = class_counts(data.shares, data.train.labels.numpy(), data.train.classes)
    rows = None
    if not isinstance(experiment.method, AnySplit):  # split devices always train their full part
        method = get_inner_method(experiment.federated_method)
        options = experiment.network.elastic_options
        policy = build_context(net, data, method, options, check=False).budget_policy
        rows = getattr(policy, "rows", None)
    return DataOverview(counts, data.summary(), None if rows is None else tuple(rows.shares))


def draw_class_counts(slug: str, label: str, overview: DataOverview) -> ReportFigure:
    """Draw how many images of each class every device has."""
    devices, classes = overview.class_counts.shape
    figure, (above, below) = make_figure(3.2 + min(classes, 40) * 0.08, (1, 3))
    sizes = overview.class_counts.sum(axis=1)
    above.bar(np.arange(devices), sizes, width=0.9, color="#0072b2", linewidth=0)
    above.set_ylabel("images")
    above.set_title(overview.description, fontsize=8, loc="left")
    above.tick_params(labelbottom=False)
    image = draw_heat_map(below, overview.class_counts.T)
    below.set_xlabel("device")
    below.set_ylabel("class")
    below.set_xticks(range(0, devices, max(1, devices // MAX_TICKS)))
    below.set_yticks(range(0, classes, max(1, classes // MAX_TICKS)))
    above.set_xlim(-0.5, devices - 0.5)
    figure.colorbar(image, ax=below, label="images", pad=0.01)
    class_totals = (overview.class_counts > 0).sum(axis=1)
    return ReportFigure(
        f"classes-{slug}",
        f"Classes of each device{label}",
        f"Heat map of images by device and class, darker where there are more. "
        f"{overview.description}. A device has {sizes.min()} to {sizes.max()} images of "
        f"{class_totals.min()} to {class_totals.max()} of the {classes} classes.",
        figure,
        ("device", "images", *(f"class {number}" for number in range(classes))),
        [
            (device, int(sizes[device]), *(int(count) for count in row))
            for device, row in enumerate(overview.class_counts)
        ],
        f"A device has {sizes.min()} to {sizes.max()} images of {class_totals.min()} to "
        f"{class_totals.max()} of the {classes} classes.",
    )


def plot_partition(data: "FederatedData", path: Path) -> Path:
    """Draw the classes of each device to a file; the suffix of `path` sets the format."""
    from pliant.data.partition import class_counts

    counts = class_counts(data.shares, data.train.labels.numpy(), data.train.classes)
    return draw_class_counts("", "", DataOverview(counts, data.summary(), None)).save(path)
