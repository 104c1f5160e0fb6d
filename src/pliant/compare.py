"""Comparisons: one TOML file with a [matrix], a run for each combination, one table in the end.

All runs of a comparison share what the matrix does not vary: data, traces and the order of both.
"""

import gc
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pliant.engine.ledger import RoundRecord
from pliant.engine.store import events
from pliant.engine.workers import AnyWorkers, Inline, Processes, opened
from pliant.experiment import Experiment, begin, build, overridden, recall, records, resolved
from pliant.params import Params
from pliant.score import c3
from pliant.value import decode, encode


@dataclass(frozen=True)
class Member:
    """One run of a comparison: what sets it apart, by key, and its description."""

    varied: tuple[tuple[str, str], ...]
    experiment: Experiment

    @property
    def name(self) -> str:
        """Return a name for its folder."""
        parts = [f"{_slug(key)}={_slug(value)}" for key, value in self.varied]
        return ",".join(parts) or "run"

    @property
    def group(self) -> tuple[tuple[str, str], ...]:
        """Return what sets it apart from others, the seed aside."""
        return tuple((key, value) for key, value in self.varied if key != "seed")


def members(path: Path, overrides: Sequence[str] = ()) -> list[Member]:
    """Read a comparison: every combination of what its [matrix] lists."""
    raw = overridden(path, overrides)
    matrix = raw.pop("matrix", {})
    if not isinstance(matrix, dict):
        raise ValueError(f"{path}: expected a table [matrix], got {matrix!r}")
    axes = [
        [(key, name, value) for name, value in _values(path, key, values)]
        for key, values in matrix.items()
    ]
    return [_member(path, raw, combination) for combination in itertools.product(*axes)]


def _values(path: Path, key: str, values: Any) -> Iterable[tuple[str, Any]]:
    """Return the named values of an axis: a list, or a table of names."""
    if isinstance(values, dict) and values:
        return values.items()
    if isinstance(values, list) and values:
        return [(str(value), value) for value in values]
    raise ValueError(
        f"{path}: expected a list or a table of values at matrix.{key}, got {values!r}"
    )


def _member(path: Path, raw: dict[str, Any], chosen: Iterable[tuple[str, str, Any]]) -> Member:
    varied = []
    made = raw
    for key, name, value in chosen:
        made = _with(made, key.split("."), value)
        varied.append((key, name))
    try:
        return Member(tuple(varied), decode(resolved(made, path.parent), Experiment))
    except ValueError as error:
        which = ", ".join(f"{key} = {name}" for key, name in varied)
        raise ValueError(f"{path} with {which or 'no matrix'}: {error}") from None


def _with(raw: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    first, *rest = keys
    if rest:
        return raw | {first: _with(raw.get(first, {}), rest, value)}
    if isinstance(value, dict) and isinstance(raw.get(first), dict):
        return raw | {first: raw[first] | value}  # what all have in common stands outside
    return raw | {first: value}


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")


def run_all(
    found: Sequence[Member],
    folder: Path,
    workers: AnyWorkers,
    tell: Callable[[Member], None] = lambda member: None,
) -> None:
    """Run what is not finished, several runs side by side; each goes on where it was."""
    waiting = [member for member in found if not is_finished(folder / member.name, member)]
    for member in waiting:
        place = folder / member.name
        if not (place / "config.json").exists():
            begin(place, member.experiment)
        elif _essence(recall(place)) != _essence(member.experiment):
            raise ValueError(
                f"{place} holds another experiment of that name: choose another folder"
            )
    with opened(workers, _nothing, partial(_perform, folder)) as pool:
        pool.run(waiting, {}, tell=tell)


def crew(found: Sequence[Member]) -> AnyWorkers:
    """Return the workers that all runs of a comparison ask for: each has one run at a time."""
    asked = list(dict.fromkeys(member.experiment.workers for member in found))
    if len(asked) > 1:
        raise ValueError(f"Expected the same workers for all runs of a comparison, got {asked}")
    return asked[0] if asked else Processes()


def _essence(experiment: Experiment) -> Any:
    """Return what a result depends on: workers can be others when a comparison goes on."""
    return encode(msgspec.structs.replace(experiment, workers=Inline()))


def _nothing() -> None:
    return None


def _perform(folder: Path, world: None, shared: Params, member: Member) -> int:
    experiment = member.experiment
    net, data = build(experiment)
    rounds = records(experiment, net, data, workers=Inline(), folder=folder / member.name)
    count = sum(1 for _ in rounds)
    del net, data, rounds
    gc.collect()  # a traced network is a ring of objects: its tensors would wait for long
    return count


def is_finished(folder: Path, member: Member) -> bool:
    """Tell whether a run has come to its last round."""
    if not (folder / "events.jsonl").exists():
        return False
    last = None
    for line in events(folder):
        last = line
    return isinstance(last, RoundRecord) and last.digest is not None


@dataclass(frozen=True)
class Row:
    """One line of the table: runs that differ in their seed only."""

    group: tuple[tuple[str, str], ...]
    seeds: int
    accuracy: tuple[float, float]  # mean and standard deviation
    narrow: float | None  # mean accuracy without filters that nobody trained, if a run has such
    rounds_to: float | None  # to the target; None where a seed did not reach it
    seconds_to: float | None
    seconds: float
    gigamacs: float  # spent, per run
    megabytes: float  # up and down
    utilisation: float
    lost: float  # share of tasks that were not merged
    best: float  # mean of the best accuracy of each run
    local: float | None  # mean accuracy after local training, where devices have their own tests
    forward: float | None  # GMACs of forward passes on clients of a split method
    total: float | None  # and with the server's
    paper_megabytes: float | None  # four bytes for each number that is not zero
    c3: float = 0.0  # under the largest costs in the table


def table(found: Sequence[Member], folder: Path, target: float) -> list[Row]:
    """Return the table of a comparison whose runs are finished."""
    groups: dict[tuple[tuple[str, str], ...], list[list[RoundRecord]]] = {}
    for member in found:
        lines = events(folder / member.name)
        rounds = [line for line in lines if isinstance(line, RoundRecord)]
        groups.setdefault(member.group, []).append(rounds)
    rows = [_row(group, runs, target) for group, runs in groups.items()]
    most_sent = max((row.megabytes for row in rows), default=0.0)
    most_macs = max((row.gigamacs for row in rows), default=0.0)
    return [
        replace(
            row,
            c3=c3(
                row.accuracy[0],
                row.megabytes,
                row.gigamacs,
                most_sent=most_sent,
                most_macs=most_macs,
            ),
        )
        for row in rows
    ]


def _row(group: tuple[tuple[str, str], ...], runs: list[list[RoundRecord]], target: float) -> Row:
    final = [run[-1].accuracy or 0.0 for run in runs]
    reached = [_reached(run, target) for run in runs]
    hits = [hit for hit in reached if hit is not None]
    whole = len(hits) == len(runs)
    tasks = sum(line.tasks for run in runs for line in run)
    return Row(
        group,
        len(runs),
        (statistics.fmean(final), statistics.stdev(final) if len(final) > 1 else 0.0),
        _narrow([run[-1] for run in runs]),
        statistics.fmean(hit.round + 1 for hit in hits) if whole else None,
        statistics.fmean(hit.seconds for hit in hits) if whole else None,
        statistics.fmean(run[-1].seconds for run in runs),
        sum(line.macs for run in runs for line in run) / len(runs) / 1e9,
        sum(line.up + line.down for run in runs for line in run) / len(runs) / 1e6,
        sum(line.useful for run in runs for line in run)
        / sum(line.available for run in runs for line in run),
        1 - sum(line.merged for run in runs for line in run) / max(1, tasks),
        statistics.fmean(max(line.accuracy or 0.0 for line in run) for run in runs),
        _local([run[-1] for run in runs]),
        *_exchanged(runs),
    )


def _local(last: list[RoundRecord]) -> float | None:
    found = [line.personal.local for line in last if line.personal is not None]
    scores = [score for score in found if score is not None]
    return statistics.fmean(scores) if scores else None


def _exchanged(runs: list[list[RoundRecord]]) -> tuple[float | None, float | None, float | None]:
    parts = [line.exchange for run in runs for line in run if line.exchange is not None]
    if not parts:
        return None, None, None
    forward = sum(part.forward for part in parts) / len(runs)
    server = sum(part.server for part in parts) / len(runs)
    nonzero = sum(part.nonzero for part in parts) / len(runs)
    return forward / 1e9, (forward + server) / 1e9, nonzero / 1e6


def _narrow(last: list[RoundRecord]) -> float | None:
    if all(line.narrow is None for line in last):
        return None
    scores = [line.narrow or line.score for line in last]
    return statistics.fmean(score.accuracy for score in scores if score is not None)


def _reached(run: list[RoundRecord], target: float) -> RoundRecord | None:
    return next((line for line in run if (line.accuracy or 0.0) >= target), None)
