"""The summary as plain numbers for other programs: one column per number, one for its spread."""

from collections.abc import Sequence

from pliant.analysis.runs import RunGroup
from pliant.analysis.summary import (
    SummaryRow,
    compute_c3,
    compute_mean_and_std,
    get_budgets,
    summarise_runs,
)

# Shares and accuracies are between 0 and 1, numbers are means over seeds.
NUMBERS = (
    "rounds", "accuracy", "trained_accuracy", "best_accuracy", "local_accuracy", "device_accuracy",
    "device_spread", "worst_decile", "rounds_to_target", "seconds_to_target", "images", "seconds",
    "gigamacs", "forward_gigamacs", "total_gigamacs", "megabytes", "paper_megabytes",
    "control_megabytes", "joules", "utilisation", "lost_share", "epsilon", "c3", "local_c3",
)  # fmt: skip
HEADER = (
    "group", "seeds", "target", "equal_seconds", "equal_accuracy",
    *(name for number in NUMBERS for name in (number, f"{number}_std")),
)  # fmt: skip


def list_summary_numbers(
    groups: Sequence[RunGroup], rows: Sequence[SummaryRow], target: float
) -> list[tuple[str, ...]]:
    """Return the cells of the rows of `summarise_groups`; those that are not known are empty."""
    budgets = get_budgets(rows)
    return [
        (
            row.label,
            str(row.seeds),
            f"{target:g}",
            *map(_format, (row.equal_seconds, row.equal_accuracy)),
            *_list_numbers(row, _summarise_seeds(group, target, budgets)),
        )
        for group, row in zip(groups, rows, strict=True)
    ]


def _summarise_seeds(
    group: RunGroup, target: float, budgets: tuple[float, float]
) -> list[dict[str, float | None]]:
    """Return the numbers of each run alone."""
    seeds = []
    for run in group.runs:
        row = summarise_runs((), [run.rounds], target)
        numbers = {name: _get_number(row, name) for name in NUMBERS}
        local = row.local_accuracy
        numbers["c3"] = compute_c3(row, row.mean_accuracy, budgets)
        numbers["local_c3"] = None if local is None else compute_c3(row, local, budgets)
        seeds.append(numbers)
    return seeds


def _list_numbers(row: SummaryRow, seeds: list[dict[str, float | None]]) -> list[str]:
    cells = []
    for name in NUMBERS:
        value = _get_number(row, name)
        values = [number for seed in seeds if (number := seed[name]) is not None]
        has_spread = value is not None and len(values) > 1
        spread = compute_mean_and_std(values)[1] if has_spread else None
        cells += [_format(value), _format(spread)]
    return cells


def _get_number(row: SummaryRow, name: str) -> float | None:
    if name == "accuracy":
        return None if row.accuracy is None else row.accuracy[0]
    number: float | None = getattr(row, name)
    return number


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"
