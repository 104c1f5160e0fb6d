"""Draw how many seconds each group needs to reach an accuracy, with the range over seeds."""

import statistics

from pliant.analysis.runs import RunFolder, RunGroup, group_comparable
from pliant.analysis.style import COLOURS, TEXT_COLOUR, ReportFigure, make_figure


def find_time_to_target(run: RunFolder, target: float) -> float | None:
    """Return the virtual seconds at which a run first has this accuracy; None if it never has."""
    hits = (r.seconds for r in run.rounds if r.accuracy is not None and r.accuracy >= target)
    return next(hits, None)


def draw_time_to_target(groups: list[RunGroup], target: float) -> ReportFigure | None:
    """Draw a bar per group, the mean over its seeds; None if no run reaches the target.

    Only groups that can be compared are compared in words; others have a colour of their own.
    """
    times = {
        group.label: [find_time_to_target(run, target) for run in group.runs] for group in groups
    }
    reached = {
        label: [time for time in values if time is not None] for label, values in times.items()
    }
    if not any(reached.values()):
        return None
    kinds = group_comparable(groups)
    colours = {
        group.label: COLOURS[index]
        for index, members in enumerate(kinds.values())
        for group in members
    }
    figure, axes = make_figure(1.1 + 0.34 * len(times))
    longest = max(time for values in reached.values() for time in values)
    for y, (label, values) in enumerate(times.items()):
        known = reached[label]
        if known:
            mean = statistics.fmean(known)
            is_complete = len(known) == len(values)
            axes.barh(
                y, mean, height=0.6, color=colours[label] if is_complete else "white",
                edgecolor=colours[label], hatch=None if is_complete else "////",
            )  # fmt: skip
            axes.plot([min(known), max(known)], [y, y], color=TEXT_COLOUR, linewidth=1.4)
        note = _describe(known, len(values))
        axes.text(max(known, default=0.0) + 0.01 * longest, y, note, va="center", fontsize=8.5)
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * longest)
    has_range = any(len(values) > 1 for values in times.values())
    axes.set_xlabel("seconds" + ("; line: range over seeds" if has_range else ""))
    axes.grid(visible=False, axis="y")
    notes = "; ".join(f"{label}: {_describe(reached[label], len(times[label]))}" for label in times)
    return ReportFigure(
        "time-to-target",
        f"Seconds to {target:.0%}",
        f"Bar chart of the seconds until test accuracy first reaches {target:.0%}. {notes}.",
        figure,
        ("group", "mean seconds", "fewest", "most", "seeds that reach it", "seeds"),
        [
            (
                label,
                *(f"{f(known):.6g}" if known else "" for f in (statistics.fmean, min, max)),
                len(known),
                len(times[label]),
            )
            for label, known in reached.items()
        ],
        " ".join(
            _conclude(kind, {group.label: times[group.label] for group in members}, target)
            for kind, members in kinds.items()
        ),
    )


def _describe(known: list[float], seeds: int) -> str:
    if not known:
        return "not reached"
    text = f"{statistics.fmean(known):.1f} s"
    return text if len(known) == seeds else f"{text} ({len(known)} of {seeds} seeds)"


def _conclude(kind: str, times: dict[str, list[float | None]], target: float) -> str:
    """Say which of some comparable groups is first; `kind` is what they are, or empty."""
    complete: dict[str, float] = {}
    for label, values in times.items():
        known = [time for time in values if time is not None]
        if len(known) == len(values):
            complete[label] = statistics.fmean(known)
    start = f"{kind.capitalize()}: " if kind else ""
    if not complete:
        nobody = "no group" if start else "No group"
        return f"{start}{nobody} reaches {target:.0%} with every seed."
    best, *others = sorted(complete, key=lambda label: complete[label])
    text = f"{start}{best} reaches {target:.0%} first, after {complete[best]:.1f} s"
    if others:
        text += f"; {others[0]} takes {complete[others[0]] / complete[best]:.2f} times as long"
    missing = len(times) - len(complete)
    if missing:
        text += f"; {missing} of {len(times)} groups {'does' if missing == 1 else 'do'} not"
    return f"{text}."
