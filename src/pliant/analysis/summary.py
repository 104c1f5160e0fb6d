"""Summarise groups of runs: one row per group, with the C3-Score."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.analysis.records import read_rounds
from pliant.analysis.runs import RunGroup
from pliant.analysis.style import MISSING, format_percent
from pliant.c3 import c3_score
from pliant.engine.record_fields import RoundFields

if TYPE_CHECKING:  # torch is slow to import
    from pliant.experiment.sweep import SweepRun

AxisValues = tuple[tuple[str, str], ...]
Rounds = Sequence[RoundFields]  # of one run


EQUAL_TIME = 0.02  # runs whose lengths differ by less count as equally long


@dataclass(frozen=True)
class SummaryRow:
    """One row of the summary: runs that differ only in their seed."""

    group: AxisValues
    seeds: int
    accuracy: tuple[float, float] | None  # mean and standard deviation of the last accuracy
    trained_accuracy: float | None  # mean, without filters that no device trained; None: all are
    rounds_to_target: float | None  # None: not every seed reached the target
    seconds_to_target: float | None
    seconds: float
    gigamacs: float  # per run
    megabytes: float  # per run, up and down
    utilisation: float | None
    lost_share: float | None  # share of tasks that were not merged
    best_accuracy: float  # mean over runs
    local_accuracy: float | None  # mean after local training, if devices have their own tests
    forward_gigamacs: float | None  # of forward passes on the clients of a split method
    total_gigamacs: float | None  # with the server's
    paper_megabytes: float | None  # four bytes per nonzero number
    c3: float = 0.0  # with the largest costs in the table as budgets
    local_c3: float | None = None  # the same, of the accuracy after local training
    images: float = 0.0  # trained on per run, counted at every visit
    rounds: float = 0.0
    joules: float = 0.0
    server_gigamacs: float = 0.0  # per run, of distillation; not part of the C3-Score
    control_megabytes: float = 0.0  # per run, beyond `megabytes`; tests on devices included
    # of the last tests by devices themselves, mean over runs
    device_accuracy: float | None = None  # weighted by test images
    device_spread: float | None = None
    worst_decile: float | None = None
    # where the shortest run of the table ends; None if all runs last equally long
    equal_seconds: float | None = None
    equal_accuracy: float | None = None  # mean over runs
    epsilon: float | None = None  # of differential privacy, mean over runs; None: not private

    @property
    def mean_accuracy(self) -> float:
        """Return the mean of the last accuracy; 0 if there is none."""
        return self.accuracy[0] if self.accuracy else 0.0

    @property
    def label(self) -> str:
        return " ".join(value for _, value in self.group)


def summarise(sweep_runs: "Sequence[SweepRun]", folder: Path, target: float) -> list[SummaryRow]:
    """Return one row for each group of a finished sweep."""
    groups: dict[AxisValues, list[Rounds]] = {}
    for run in sweep_runs:
        groups.setdefault(run.group, []).append(read_rounds(folder / run.name))
    return _summarise(groups, target)


def summarise_groups(groups: list[RunGroup], target: float) -> list[SummaryRow]:
    rounds: dict[AxisValues, list[Rounds]] = {
        (("group", group.label),): [run.rounds for run in group.runs] for group in groups
    }
    return _summarise(rounds, target)


def _summarise(groups: Mapping[AxisValues, Sequence[Rounds]], target: float) -> list[SummaryRow]:
    rows = [summarise_runs(group, runs, target) for group, runs in groups.items()]
    rows = _compare_at_equal_time(rows, list(groups.values()))
    budgets = get_budgets(rows)
    return [
        replace(
            row,
            c3=compute_c3(row, row.mean_accuracy, budgets),
            local_c3=None
            if row.local_accuracy is None
            else compute_c3(row, row.local_accuracy, budgets),
        )
        for row in rows
    ]


def _compare_at_equal_time(
    rows: list[SummaryRow], groups: Sequence[Sequence[Rounds]]
) -> list[SummaryRow]:
    """Add the accuracies at the end of the shortest run, if others last longer."""
    ends = [run[-1].seconds for runs in groups for run in runs]
    if not ends or max(ends) <= (1 + EQUAL_TIME) * min(ends):
        return rows
    limit = (1 + 1e-9) * min(ends)
    compared = []
    for row, runs in zip(rows, groups, strict=True):
        known = [[r.accuracy for r in run if r.accuracy is not None and r.seconds <= limit]
                 for run in runs]  # fmt: skip
        last = [accuracies[-1] for accuracies in known if accuracies]
        accuracy = statistics.fmean(last) if len(last) == len(runs) else None
        compared.append(replace(row, equal_seconds=min(ends), equal_accuracy=accuracy))
    return compared


def get_budgets(rows: Sequence[SummaryRow]) -> tuple[float, float]:
    """Return the budgets of the C3-Score: the most megabytes and GMACs of any row."""
    return (
        max((row.megabytes for row in rows), default=0.0),
        max((row.gigamacs for row in rows), default=0.0),
    )


def rank_by_c3(rows: Sequence[SummaryRow], factor: float = 1.0) -> list[str]:
    """Return the rows' labels by falling C3-Score, with the budgets times a factor."""
    megabytes, gigamacs = get_budgets(rows)
    budgets = factor * megabytes, factor * gigamacs
    ranked = sorted(rows, key=lambda row: -compute_c3(row, row.mean_accuracy, budgets))
    return [row.label for row in ranked]


def compute_c3(row: SummaryRow, accuracy: float, budgets: tuple[float, float]) -> float:
    """Return the C3-Score of an accuracy at the costs of a row."""
    megabytes, gigamacs = budgets
    return c3_score(accuracy, row.megabytes, row.gigamacs, max_traffic=megabytes, max_macs=gigamacs)


def summarise_runs(group: AxisValues, runs: Sequence[Rounds], target: float) -> SummaryRow:
    """Summarise runs that differ only in their seed, without the C3-Score."""
    accuracies = [[r.accuracy for r in run if r.accuracy is not None] for run in runs]
    final = [values[-1] for values in accuracies if values]
    hits = [next((r for r in run if (r.accuracy or 0.0) >= target), None) for run in runs]
    reached = [hit for hit in hits if hit is not None]
    all_reached = len(reached) == len(runs)
    records = [record for run in runs for record in run]
    tasks = sum(record.tasks for record in records)
    available = sum(record.available for record in records)
    personal = [run[-1].personal for run in runs]
    local = [p.local_accuracy for p in personal if p is not None and p.local_accuracy is not None]
    return SummaryRow(
        group,
        len(runs),
        compute_mean_and_std(final) if final else None,
        _average_trained_accuracy([run[-1] for run in runs]),
        statistics.fmean(hit.round + 1 for hit in reached) if all_reached else None,
        statistics.fmean(hit.seconds for hit in reached) if all_reached else None,
        statistics.fmean(run[-1].seconds for run in runs),
        sum(record.macs for record in records) / len(runs) / 1e9,
        sum(record.up + record.down for record in records) / len(runs) / 1e6,
        sum(record.useful for record in records) / available if available else None,
        1 - sum(record.merged for record in records) / tasks if tasks else None,
        statistics.fmean(max(values, default=0.0) for values in accuracies),
        statistics.fmean(local) if local else None,
        *_average_exchange(runs),
        images=sum(record.samples for record in records) / len(runs),
        rounds=statistics.fmean(map(len, runs)),
        joules=sum(record.joules for record in records) / len(runs),
        server_gigamacs=sum(record.server_macs for record in records) / len(runs) / 1e9,
        control_megabytes=sum(record.control_bytes for record in records) / len(runs) / 1e6,
        epsilon=_average_epsilon([run[-1] for run in runs]),
        **_average_device_scores(runs),
    )


def compute_mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 0 for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _average_exchange(runs: Sequence[Rounds]) -> tuple[float | None, float | None, float | None]:
    parts = [record.exchange for run in runs for record in run if record.exchange is not None]
    if not parts:
        return None, None, None
    names = ("forward", "server", "nonzero")
    forward, server, nonzero = (sum(getattr(p, n) for p in parts) / len(runs) for n in names)
    return forward / 1e9, (forward + server) / 1e9, nonzero / 1e6


def _average_device_scores(runs: Sequence[Rounds]) -> dict[str, float]:
    tested = [[r.on_devices for r in run if r.on_devices is not None] for run in runs]
    last = [scores[-1] for scores in tested if scores]
    if not last:
        return {}
    return {
        "device_accuracy": statistics.fmean(scores.accuracy for scores in last),
        "device_spread": statistics.fmean(scores.spread for scores in last),
        "worst_decile": statistics.fmean(scores.worst_decile for scores in last),
    }


def _average_epsilon(last_rounds: Rounds) -> float | None:
    values = [record.epsilon for record in last_rounds if record.epsilon is not None]
    return statistics.fmean(values) if len(values) == len(last_rounds) else None


def _average_trained_accuracy(last_rounds: Rounds) -> float | None:
    if all(record.trained_score is None for record in last_rounds):
        return None
    scores = [record.trained_score or record.score for record in last_rounds]
    return statistics.fmean(s.accuracy for s in scores if s is not None and s.accuracy is not None)


def format_summary(
    rows: list[SummaryRow], target: float
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows as text, without columns that are empty in all rows."""
    limits = {row.equal_seconds for row in rows} - {None}
    equal_time = f"at {limits.pop():.4g} s" if len(limits) == 1 else "at equal time"
    texts = [_format_row(row, target, equal_time) for row in rows]
    columns = [name for name in texts[0] if any(text[name] != MISSING for text in texts)]
    return tuple(columns), [tuple(text[name] for name in columns) for text in texts]


def _format_row(row: SummaryRow, target: float, equal_time: str) -> dict[str, str]:
    mean, std = row.accuracy or (None, 0.0)
    spread = f"{100 * mean:.2f} ± {100 * std:.2f} %" if mean is not None else MISSING
    rounds, seconds = row.rounds_to_target, row.seconds_to_target
    return {
        "group": row.label,
        "seeds": f"{row.seeds}",
        "rounds": f"{row.rounds:g}",
        "accuracy": spread if row.seeds > 1 else format_percent(mean),
        equal_time: format_percent(row.equal_accuracy),
        "on devices": format_percent(row.device_accuracy),
        "spread": format_percent(row.device_spread),
        "worst decile": format_percent(row.worst_decile),
        f"rounds to {target:.0%}": MISSING if rounds is None else f"{rounds:.1f}",
        f"s to {target:.0%}": MISSING if seconds is None else f"{seconds:.1f}",
        "images": f"{row.images:.0f}",
        "seconds": f"{row.seconds:.1f}",
        "GMACs": f"{row.gigamacs:.1f}",
        "server GMACs": f"{row.server_gigamacs:.1f}" if row.server_gigamacs else MISSING,
        "MB": f"{row.megabytes:.1f}",
        "control MB": f"{row.control_megabytes:.1f}" if row.control_megabytes else MISSING,
        "joules": f"{row.joules:.3g}" if row.joules else MISSING,
        "used": format_percent(row.utilisation),
        "lost": format_percent(row.lost_share),
        "epsilon": MISSING if row.epsilon is None else f"{row.epsilon:.2f}",
        "C3": f"{row.c3:.3f}" if row.accuracy else MISSING,
        "C3 local": MISSING if row.local_c3 is None else f"{row.local_c3:.3f}",
    }
