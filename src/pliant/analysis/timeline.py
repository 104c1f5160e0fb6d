"""Draw the timeline of devices: when each mini-batch ran, and which tasks were lost."""

from collections.abc import Mapping, Sequence
from typing import Any

from pliant.analysis.records import read_tasks
from pliant.analysis.runs import RunFolder
from pliant.analysis.style import EDGE_COLOUR, ReportFigure, make_figure
from pliant.engine.record_fields import TaskFields
from pliant.extras import require

MAX_DEVICES = 30  # rows of the figure
Shares = Sequence[float]  # cost of each table row, relative to the full network
LOST_OUTCOMES = ("late", "dropped", "rejected", "surplus", "void")


def load_tasks(run: RunFolder, first_round: int, round_count: int) -> list[TaskFields]:
    """Read the tasks of some rounds, or those sent in that time of an asynchronous run.

    Times count from the run's start, and each start has an end.
    """
    round_ends = {record.round: record.seconds for record in run.rounds}
    last_round = first_round + round_count - 1
    if run.is_asynchronous:
        length = float(run.config.get("fleet", {}).get("round_seconds", 1.0))
        sent_from, sent_until = first_round * length, (first_round + round_count) * length
        last_round = sum(seconds < sent_until + round_count * length for seconds in run["seconds"])
    tasks = []
    for task in read_tasks(run.folder, last_round):
        if task.sent_at is None:
            is_shown, start = task.round >= first_round, round_ends.get(task.round - 1, 0.0)
        else:
            is_shown, start = sent_from <= task.sent_at < sent_until, task.sent_at
        if is_shown and task.round in round_ends and task.starts:
            task.ends = [start + end for end in task.complete_ends(round_ends[task.round] - start)]
            task.starts = [start + time for time in task.starts]
            tasks.append(task)
    return sorted(tasks, key=lambda task: (task.round, task.device))


def draw_timeline(
    slug: str,
    label: str,
    tasks: list[TaskFields],
    shares: Shares | None,
    sides: Mapping[int, int | None] | None = None,
    merges: Sequence[float] = (),
) -> ReportFigure | None:
    """Draw some rounds of one run; without `shares` of cost, bars are shaded by table row.

    `sides` are those of the training images in each round, if they were scaled down. `merges` are
    the times at which an asynchronous run merged updates.
    """
    all_devices = sorted({task.device for task in tasks})
    if not all_devices:
        return None
    devices = all_devices[:MAX_DEVICES]
    lanes = {device: lane for lane, device in enumerate(devices)}
    max_row = max((row for task in tasks for row in task.rows), default=0)
    scale_max = 1.0 if shares else float(max_row + 1)
    colours = require("matplotlib", "report").colormaps["cividis_r"]
    figure, axes = make_figure(1.5 + 0.24 * len(devices))
    for task in tasks:
        if task.device in lanes:
            _draw_task(axes, task, lanes[task.device], shares, scale_max, colours)
    rounds, unit = sorted({task.round for task in tasks}), "version" if merges else "round"
    end = max(task.ends[-1] for task in tasks)
    for time in merges:
        if time <= end:
            axes.axvline(time, color="#1d2733", linewidth=0.6, linestyle=(0, (1, 3)))
    for number in () if merges else rounds:
        start = min(task.starts[0] for task in tasks if task.round == number)
        axes.axvline(start, color="#1d2733", linewidth=0.9, linestyle=(0, (4, 3)))
        side = (sides or {}).get(number)
        size = "" if side is None else f", {side}x{side} pixels"
        axes.text(start, -0.75, f" round {number + 1}{size}", fontsize=8, va="bottom")
    axes.set_yticks(range(len(devices)), [str(device) for device in devices], fontsize=8)
    axes.set_ylim(len(devices) - 0.4, -0.8)
    axes.set_xlabel("seconds")
    axes.set_ylabel("device")
    axes.grid(visible=False)
    _draw_colour_bar(figure, axes, colours, scale_max, has_shares=shares is not None)
    lost = [task for task in tasks if _get_outcome_kind(task) in LOST_OUTCOMES]
    return ReportFigure(
        f"timeline-{slug}",
        f"Devices over time: {label}",
        f"Timeline of {len(devices)} of {len(all_devices)} devices in {len(rounds)} "
        f"{unit}s: a bar is a mini-batch, darker where more of the network was trained. "
        f"{'A dotted line is a merge. ' if merges else ''}{len(lost)} of {len(tasks)} tasks "
        f"were not merged (hatched): {_describe_tasks(lost, unit)}.",
        figure,
        ("round", "device", "end", "mini-batch", "start", "stop", "row", "cost share"),
        [row for task in tasks for row in _make_rows(task, shares)],
        f"{len(tasks) - len(lost)} of {len(tasks)} tasks were merged.",
    )


def _get_outcome_kind(task: TaskFields) -> str:
    return task.outcome.partition(":")[0]


def _describe_tasks(tasks: list[TaskFields], unit: str) -> str:
    texts = [
        f"device {t.device} {_get_outcome_kind(t)} in {unit} {t.round + 1}" for t in tasks[:20]
    ]
    more = f" and {len(tasks) - 20} more" if len(tasks) > 20 else ""
    return ", ".join(texts) + more if texts else "none"


def _get_cost_share(task: TaskFields, step: int, shares: Shares | None) -> float | None:
    """Return a mini-batch's share of the full network's cost; None if it is not known."""
    if shares is None or step >= len(task.rows):
        return None
    row = task.rows[step]
    return shares[row] if 0 <= row < len(shares) else 1.0


def _draw_task(
    axes: Any, task: TaskFields, y: int, shares: Shares | None, scale_max: float, colours: Any
) -> None:
    levels = []
    for step in range(len(task.starts)):
        share = _get_cost_share(task, step, shares)
        if share is None:
            share = (task.rows[step] + 1) / scale_max if step < len(task.rows) else 1.0
        levels.append(share)
    kind = _get_outcome_kind(task)
    is_lost = kind in LOST_OUTCOMES
    axes.broken_barh(
        [(start, end - start) for start, end in zip(task.starts, task.ends, strict=True)],
        (y - 0.38, 0.76),
        facecolors=[colours(0.05 + 0.8 * level) for level in levels],
        edgecolor=EDGE_COLOUR if not is_lost else "#b00020",
        hatch="////" if is_lost else None,
        linewidth=0.5,
    )
    if kind != "finished":
        axes.text(
            task.ends[-1], y, f"{kind} ", fontsize=6.5, va="center", ha="right",
            color="#1d2733",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "linewidth": 0},
        )  # fmt: skip


def _draw_colour_bar(
    figure: Any, axes: Any, colours: Any, scale_max: float, *, has_shares: bool
) -> None:
    normalize = require("matplotlib.colors", "report").Normalize
    scale = normalize(-0.05 / 0.8 * scale_max, (0.95 / 0.8) * scale_max)
    mapping = require("matplotlib.cm", "report").ScalarMappable(scale, colours)
    bar = figure.colorbar(mapping, ax=axes, pad=0.01, aspect=30)
    bar.ax.set_ylim(0, scale_max)
    bar.set_label("cost, share of the full network" if has_shares else "row of the table")


def _make_rows(task: TaskFields, shares: Shares | None) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for step, (start, end) in enumerate(zip(task.starts, task.ends, strict=True)):
        row = task.rows[step] if step < len(task.rows) else ""
        share = _get_cost_share(task, step, shares)
        cost: object = "" if share is None else round(share, 4)
        times = (round(start, 6), round(end, 6))
        rows.append((task.round + 1, task.device, task.outcome, step + 1, *times, row, cost))
    return rows
