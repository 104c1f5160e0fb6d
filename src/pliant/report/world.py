"""What a run's config says about its world: the classes of each device, the costs of table rows.

Both follow from the config alone; a run whose data are not here, or that is of another kind, has
a reason in the place of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.report.look import SHADES, Drawn, canvas
from pliant.report.runs import Run

TICKS = 12


@dataclass(frozen=True, eq=False)
class World:
    """What was found out about a run's world."""

    counts: NDArray[np.int64]  # (device, class)
    told: str
    shares: tuple[float, ...] | None  # of the method's rows; None if it has no table


def load_world(run: Run) -> World | str:
    """Build the data and the network of a run anew, or say why that cannot be done."""
    from pliant.data.picture import class_counts
    from pliant.engine.job import example_of
    from pliant.experiment import build, recall
    from pliant.nn.elastic import elastic
    from pliant.split import AnySplit

    try:
        experiment = recall(run.folder)
        net, data = build(experiment)
    except (ValueError, LookupError, OSError) as error:
        return str(error)
    counts = class_counts(data.devices, data.train.labels.numpy(), data.train.classes)
    rows = None
    if not isinstance(experiment.method, AnySplit):  # whose devices train all of their part
        rows = getattr(experiment.method.plan(elastic(net, example_of(data))), "rows", None)
    return World(counts, data.summary(), None if rows is None else tuple(rows.shares))


def draw_classes(slug: str, label: str, world: World) -> Drawn:
    """Draw how many images of each class every device has."""
    devices, classes = world.counts.shape
    figure, (above, below) = canvas(3.2 + min(classes, 40) * 0.08, (1, 3))
    sizes = world.counts.sum(axis=1)
    above.bar(np.arange(devices), sizes, width=0.9, color="#0072b2", linewidth=0)
    above.set_ylabel("images")
    above.tick_params(labelbottom=False)
    drawn = below.imshow(
        world.counts.T, aspect="auto", interpolation="nearest", cmap=SHADES, origin="lower"
    )
    below.grid(visible=False)
    below.set_xlabel("device")
    below.set_ylabel("class")
    below.set_xticks(range(0, devices, max(1, devices // TICKS)))
    below.set_yticks(range(0, classes, max(1, classes // TICKS)))
    above.set_xlim(-0.5, devices - 0.5)
    figure.colorbar(drawn, ax=below, label="images", pad=0.01)
    held = (world.counts > 0).sum(axis=1)
    return Drawn(
        f"classes-{slug}",
        f"Classes of each device{label}",
        f"Heat map of images by device and class, darker where there are more. {world.told}. A "
        f"device has {sizes.min()} to {sizes.max()} images of {held.min()} to {held.max()} "
        f"of the {classes} classes.",
        figure,
        ("device", "images", *(f"class {number}" for number in range(classes))),
        [
            (device, int(sizes[device]), *(int(count) for count in row))
            for device, row in enumerate(world.counts)
        ],
    )
