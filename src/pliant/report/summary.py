"""The table of a report: one line for each group, with the C3-Score under its own budgets."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from pliant.report.history import History, Sample
from pliant.report.look import NONE, percent
from pliant.report.use import shares
from pliant.score import c3


@dataclass(frozen=True)
class Line:
    """One group of runs; means over its seeds."""

    label: str
    seeds: int
    rounds: float
    accuracy: tuple[float, float] | None  # mean and standard deviation of the last ones
    reached: tuple[float, float] | None  # rounds and seconds to the target; None: not by all
    seconds: float
    macs: float
    traffic: float  # bytes, up and down
    joules: float
    used: float | None
    lost: float | None  # share of tasks that were not merged
    c3: float | None


def summarised(samples: list[Sample], target: float) -> list[Line]:
    """Return the lines of the table; its budgets are what the greediest group took."""
    macs = [_mean(sample, _macs) for sample in samples]
    traffic = [_mean(sample, _traffic) for sample in samples]
    budgets = max(traffic, default=0.0), max(macs, default=0.0)
    found = []
    for sample, spent, sent in zip(samples, macs, traffic, strict=True):
        final = [one.accuracy for one in sample.histories if one.accuracy is not None]
        mean = statistics.fmean(final) if final else None
        spread = statistics.stdev(final) if len(final) > 1 else 0.0
        use = shares(sample)
        tasks = sum(history.total("tasks") for history in sample.histories)
        merged = sum(history.total("merged") for history in sample.histories)
        found.append(
            Line(
                sample.label,
                len(sample.histories),
                statistics.fmean(len(history["round"]) for history in sample.histories),
                None if mean is None else (mean, spread),
                _reached(sample, target),
                statistics.fmean(float(history["seconds"][-1]) for history in sample.histories),
                spent,
                sent,
                _mean(sample, lambda history: history.total("joules")),
                None if use is None else use[0],
                1 - merged / tasks if tasks else None,
                None if mean is None else _c3(mean, sent, spent, budgets),
            )
        )
    return found


def _c3(accuracy: float, sent: float, macs: float, budgets: tuple[float, float]) -> float:
    return c3(accuracy, sent, macs, most_sent=budgets[0], most_macs=budgets[1])


def _macs(history: History) -> float:
    return history.total("macs")


def _traffic(history: History) -> float:
    return history.total("down") + history.total("up")


def _mean(sample: Sample, value: Callable[[History], float]) -> float:
    return statistics.fmean(value(history) for history in sample.histories)


def _reached(sample: Sample, target: float) -> tuple[float, float] | None:
    """Return the mean rounds and seconds to an accuracy; None where a seed did not get there."""
    hits = []
    for history in sample.histories:
        places = (history["accuracy"] >= target).nonzero()[0]
        if not len(places):
            return None
        hits.append((float(history["round"][places[0]]) + 1, float(history["seconds"][places[0]])))
    return statistics.fmean(hit[0] for hit in hits), statistics.fmean(hit[1] for hit in hits)


def table_of(lines: list[Line], target: float) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the lines as text; a column that nobody has anything for is left out."""
    rows = [_row(line) for line in lines]
    heads = (
        "group", "seeds", "rounds", "accuracy", f"rounds to {target:.0%}", f"s to {target:.0%}",
        "seconds", "GMACs", "MB", "joules", "used", "lost", "C3",
    )  # fmt: skip
    kept = [at for at in range(len(heads)) if any(row[at] != NONE for row in rows)]
    return tuple(heads[at] for at in kept), [tuple(row[at] for at in kept) for row in rows]


def _row(line: Line) -> tuple[str, ...]:
    rounds, seconds = line.reached or (None, None)
    return (
        line.label,
        f"{line.seeds}",
        f"{line.rounds:g}",
        _accuracy(line),
        NONE if rounds is None else f"{rounds:.1f}",
        NONE if seconds is None else f"{seconds:.1f}",
        f"{line.seconds:.1f}",
        f"{line.macs / 1e9:.1f}",
        f"{line.traffic / 1e6:.1f}",
        f"{line.joules:.3g}" if line.joules else NONE,
        percent(line.used),
        percent(line.lost),
        NONE if line.c3 is None else f"{line.c3:.3f}",
    )


def _accuracy(line: Line) -> str:
    if line.accuracy is None:
        return NONE
    mean, spread = line.accuracy
    return f"{100 * mean:.2f} ± {100 * spread:.2f} %" if line.seeds > 1 else percent(mean)
