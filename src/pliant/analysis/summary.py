"""Summarise groups of runs: one row per group, with the C3-Score."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from pliant.analysis.history import GroupHistory, RunHistory
from pliant.analysis.style import MISSING, format_percent
from pliant.analysis.utilisation import compute_utilisation
from pliant.c3 import c3_score


@dataclass(frozen=True)
class GroupSummary:
    """One group of runs: means over its seeds."""

    label: str
    seeds: int
    rounds: float
    accuracy: tuple[float, float] | None  # mean and standard deviation of the last accuracy
    time_to_target: tuple[float, float] | None  # rounds and seconds; None if a seed missed it
    seconds: float
    macs: float
    traffic: float  # bytes, up and down
    joules: float
    utilisation: float | None
    lost_share: float | None  # of tasks that were not merged
    c3: float | None


def summarise_groups(group_histories: list[GroupHistory], target: float) -> list[GroupSummary]:
    """Return one summary per group; the C3 budgets are the largest use of any group."""
    all_macs = [_average_over_runs(group, _sum_macs) for group in group_histories]
    all_traffic = [_average_over_runs(group, _sum_traffic) for group in group_histories]
    max_macs, max_traffic = max(all_macs, default=0.0), max(all_traffic, default=0.0)
    summaries = []
    for group, macs, traffic in zip(group_histories, all_macs, all_traffic, strict=True):
        histories = group.histories
        accuracies = [h.final_accuracy for h in histories if h.final_accuracy is not None]
        mean = statistics.fmean(accuracies) if accuracies else None
        std = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        c3 = None
        if mean is not None:
            c3 = c3_score(mean, traffic, macs, max_traffic=max_traffic, max_macs=max_macs)
        utilisation = compute_utilisation(group)
        tasks = sum(history.total("tasks") for history in histories)
        merged = sum(history.total("merged") for history in histories)
        summaries.append(
            GroupSummary(
                group.label,
                len(histories),
                statistics.fmean(len(history["round"]) for history in histories),
                None if mean is None else (mean, std),
                _compute_time_to_target(group, target),
                statistics.fmean(float(history["seconds"][-1]) for history in histories),
                macs,
                traffic,
                _average_over_runs(group, lambda history: history.total("joules")),
                None if utilisation is None else utilisation[0],
                1 - merged / tasks if tasks else None,
                c3,
            )
        )
    return summaries


def _sum_macs(history: RunHistory) -> float:
    return history.total("macs")


def _sum_traffic(history: RunHistory) -> float:
    return history.total("down") + history.total("up")


def _average_over_runs(
    group_history: GroupHistory, measure: Callable[[RunHistory], float]
) -> float:
    return statistics.fmean(measure(history) for history in group_history.histories)


def _compute_time_to_target(
    group_history: GroupHistory, target: float
) -> tuple[float, float] | None:
    """Return the mean rounds and seconds to an accuracy; None if a seed did not reach it."""
    rounds, seconds = [], []
    for history in group_history.histories:
        reached = (history["accuracy"] >= target).nonzero()[0]
        if not len(reached):
            return None
        rounds.append(float(history["round"][reached[0]]) + 1)
        seconds.append(float(history["seconds"][reached[0]]))
    return statistics.fmean(rounds), statistics.fmean(seconds)


def format_summary(
    summaries: list[GroupSummary], target: float
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows as text, without columns that are empty in all rows."""
    rows = [_format_row(summary) for summary in summaries]
    header = (
        "group", "seeds", "rounds", "accuracy", f"rounds to {target:.0%}", f"s to {target:.0%}",
        "seconds", "GMACs", "MB", "joules", "used", "lost", "C3",
    )  # fmt: skip
    columns = [i for i in range(len(header)) if any(row[i] != MISSING for row in rows)]
    return tuple(header[i] for i in columns), [tuple(row[i] for i in columns) for row in rows]


def _format_row(summary: GroupSummary) -> tuple[str, ...]:
    rounds, seconds = summary.time_to_target or (None, None)
    return (
        summary.label,
        f"{summary.seeds}",
        f"{summary.rounds:g}",
        _format_accuracy(summary),
        MISSING if rounds is None else f"{rounds:.1f}",
        MISSING if seconds is None else f"{seconds:.1f}",
        f"{summary.seconds:.1f}",
        f"{summary.macs / 1e9:.1f}",
        f"{summary.traffic / 1e6:.1f}",
        f"{summary.joules:.3g}" if summary.joules else MISSING,
        format_percent(summary.utilisation),
        format_percent(summary.lost_share),
        MISSING if summary.c3 is None else f"{summary.c3:.3f}",
    )


def _format_accuracy(summary: GroupSummary) -> str:
    if summary.accuracy is None:
        return MISSING
    mean, std = summary.accuracy
    return f"{100 * mean:.2f} ± {100 * std:.2f} %" if summary.seeds > 1 else format_percent(mean)
