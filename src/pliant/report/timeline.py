"""The timeline of devices: which mini-batch each ran when, at what cost, and who was late."""

from collections.abc import Sequence
from typing import Any

from pliant.extras import need
from pliant.report.history import TaskLine
from pliant.report.look import Drawn, canvas

DEVICES = 30  # rows of the picture
BAD = ("late", "dropped", "rejected", "surplus", "void")


def draw_timeline(
    slug: str, label: str, tasks: list[TaskLine], shares: Sequence[float] | None
) -> Drawn | None:
    """Draw some rounds of one run; without `shares` of cost, bars are shaded by table row."""
    devices = sorted({task.device for task in tasks})
    if not devices:
        return None
    shown = devices[:DEVICES]
    place = {device: at for at, device in enumerate(shown)}
    top = 1.0 if shares else float(max((row for task in tasks for row in task.rows), default=0) + 1)
    colours = need("matplotlib", "report").colormaps["cividis_r"]
    figure, axes = canvas(1.5 + 0.24 * len(shown))
    for task in tasks:
        if task.device in place:
            _draw_task(axes, task, place[task.device], shares, top, colours)
    for number in sorted({task.round for task in tasks}):
        opens = min(task.spans[0][0] for task in tasks if task.round == number)
        axes.axvline(opens, color="#1d2733", linewidth=0.9, linestyle=(0, (4, 3)))
        axes.text(opens, -0.75, f" round {number + 1}", fontsize=8, va="bottom")
    axes.set_yticks(range(len(shown)), [str(device) for device in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.8)
    axes.set_xlabel("seconds")
    axes.set_ylabel("device")
    axes.grid(visible=False)
    _scale(figure, axes, colours, top, has_shares=shares is not None)
    lost = [task for task in tasks if _kind(task) in BAD]
    return Drawn(
        f"timeline-{slug}",
        f"Devices over time: {label}",
        f"Timeline of {len(shown)} of {len(devices)} devices in {len({t.round for t in tasks})} "
        f"rounds: a bar is a mini-batch, darker where more of the network was trained. Of "
        f"{len(tasks)} tasks {len(lost)} came to nothing (hatched): {_named(lost)}.",
        figure,
        ("round", "device", "end", "mini-batch", "start", "stop", "row", "cost share"),
        [row for task in tasks for row in _rows(task, shares)],
    )


def _kind(task: TaskLine) -> str:
    return task.end.partition(":")[0]


def _named(lost: list[TaskLine]) -> str:
    told = [f"device {task.device} {_kind(task)} in round {task.round + 1}" for task in lost[:20]]
    more = f" and {len(lost) - 20} more" if len(lost) > 20 else ""
    return ", ".join(told) + more if told else "none"


def _share(task: TaskLine, at: int, shares: Sequence[float] | None) -> float | None:
    """Return a mini-batch's share of the full network's cost; None where it is not known."""
    if shares is None or at >= len(task.rows):
        return None
    row = task.rows[at]
    return shares[row] if 0 <= row < len(shares) else 1.0


def _draw_task(
    axes: Any,
    task: TaskLine,
    at: int,
    shares: Sequence[float] | None,
    top: float,
    colours: Any,
) -> None:
    plain = [_share(task, step, shares) for step in range(len(task.spans))]
    level = [
        one if one is not None else (task.rows[step] + 1) / top if step < len(task.rows) else 1.0
        for step, one in enumerate(plain)
    ]
    is_lost = _kind(task) in BAD
    axes.broken_barh(
        [(start, stop - start) for start, stop in task.spans],
        (at - 0.38, 0.76),
        facecolors=[colours(0.05 + 0.8 * one) for one in level],
        edgecolor="white" if not is_lost else "#b00020",
        hatch="////" if is_lost else None,
        linewidth=0.5,
    )
    if _kind(task) != "finished":
        axes.text(
            task.spans[-1][1], at, f"{_kind(task)} ", fontsize=6.5, va="center", ha="right",
            color="#1d2733",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "linewidth": 0},
        )  # fmt: skip


def _scale(figure: Any, axes: Any, colours: Any, top: float, *, has_shares: bool) -> None:
    mapping = need("matplotlib.cm", "report").ScalarMappable(
        need("matplotlib.colors", "report").Normalize(-0.05 / 0.8 * top, (0.95 / 0.8) * top),
        colours,
    )
    bar = figure.colorbar(mapping, ax=axes, pad=0.01, aspect=30)
    bar.ax.set_ylim(0, top)
    bar.set_label("cost, share of the full network" if has_shares else "row of the table")


def _rows(task: TaskLine, shares: Sequence[float] | None) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for step, (start, stop) in enumerate(task.spans):
        row = task.rows[step] if step < len(task.rows) else ""
        share = _share(task, step, shares)
        cost: object = "" if share is None else round(share, 4)
        times = (round(start, 6), round(stop, 6))
        found.append((task.round + 1, task.device, task.end, step + 1, *times, row, cost))
    return found
