"""Sweeps: run every combination of a file's [matrix] and summarise the results.

The runs share everything that the matrix does not vary, including data, traces and their order.
"""

import gc
import itertools
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pliant.c3 import c3_score
from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records
from pliant.experiment.build import build_experiment, run_experiment
from pliant.experiment.config import (
    Experiment,
    load_run_config,
    read_toml,
    resolve_paths,
    start_run,
)
from pliant.params import Params
from pliant.value import decode, encode
from pliant.workers.pool import AnyWorkers, InlineWorkers, ProcessWorkers, open_pool


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its values on the axes of the matrix, and its experiment."""

    axis_values: tuple[tuple[str, str], ...]
    experiment: Experiment

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        parts = [f"{_slugify(key)}={_slugify(value)}" for key, value in self.axis_values]
        return ",".join(parts) or "run"

    @property
    def group(self) -> tuple[tuple[str, str], ...]:
        """Return the axis values without the seed."""
        return tuple((key, value) for key, value in self.axis_values if key != "seed")


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> list[SweepRun]:
    """Read a sweep: one run for every combination in its [matrix]."""
    raw = read_toml(path, overrides)
    matrix = raw.pop("matrix", {})
    if not isinstance(matrix, dict):
        raise ValueError(f"{path}: expected a table [matrix], got {matrix!r}")
    axes = [
        [(key, name, value) for name, value in _parse_axis(path, key, values)]
        for key, values in matrix.items()
    ]
    return [_make_run(path, raw, combination) for combination in itertools.product(*axes)]


def _parse_axis(path: Path, key: str, values: Any) -> Iterable[tuple[str, Any]]:
    """Return the named values of an axis, which is a list or a table."""
    if isinstance(values, dict) and values:
        return values.items()
    if isinstance(values, list) and values:
        return [(str(value), value) for value in values]
    raise ValueError(
        f"{path}: expected a list or a table of values at matrix.{key}, got {values!r}"
    )


def _make_run(
    path: Path, raw: dict[str, Any], combination: Iterable[tuple[str, str, Any]]
) -> SweepRun:
    axis_values = []
    for key, name, value in combination:
        raw = _set_value(raw, key.split("."), value)
        axis_values.append((key, name))
    try:
        return SweepRun(tuple(axis_values), decode(resolve_paths(raw, path.parent), Experiment))
    except ValueError as error:
        values = ", ".join(f"{key} = {name}" for key, name in axis_values)
        raise ValueError(f"{path} with {values or 'no matrix'}: {error}") from None


def _set_value(raw: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    first, *rest = keys
    if rest:
        return raw | {first: _set_value(raw.get(first, {}), rest, value)}
    if isinstance(value, dict) and isinstance(raw.get(first), dict):
        return raw | {first: raw[first] | value}  # keep the keys that all values share
    return raw | {first: value}


def _slugify(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")


def run_sweep(
    runs: Sequence[SweepRun],
    folder: Path,
    workers: AnyWorkers,
    on_finish: Callable[[SweepRun], None] = lambda run: None,
) -> None:
    """Run or resume the unfinished runs in parallel."""
    unfinished = [run for run in runs if not is_finished(folder / run.name)]
    for run in unfinished:
        run_folder = folder / run.name
        if not (run_folder / "config.json").exists():
            start_run(run_folder, run.experiment)
        elif _strip_workers(load_run_config(run_folder)) != _strip_workers(run.experiment):
            raise ValueError(
                f"{run_folder} holds a different experiment with this name: choose another folder"
            )
    with open_pool(workers, _skip_setup, partial(_run_one, folder)) as pool:
        pool.run(unfinished, {}, on_finish=on_finish)


def resolve_workers(runs: Sequence[SweepRun]) -> AnyWorkers:
    """Return the workers of a sweep, which must be the same for all runs."""
    kinds = list(dict.fromkeys(run.experiment.workers for run in runs))
    if len(kinds) > 1:
        raise ValueError(f"Expected the same workers for all runs of a sweep, got {kinds}")
    return kinds[0] if kinds else ProcessWorkers()


def _strip_workers(experiment: Experiment) -> Any:
    """Return what the result depends on: a sweep may resume with other workers."""
    return encode(msgspec.structs.replace(experiment, workers=InlineWorkers()))


def _skip_setup() -> None:
    return None


def _run_one(folder: Path, context: None, shared: Params, run: SweepRun) -> int:
    experiment = run.experiment
    net, data = build_experiment(experiment)
    rounds = run_experiment(
        experiment, net, data, workers=InlineWorkers(), folder=folder / run.name
    )
    count = sum(1 for _ in rounds)
    del net, data, rounds
    gc.collect()  # a traced network has reference cycles, which would keep its tensors alive
    return count


def is_finished(folder: Path) -> bool:
    """Return whether a run has recorded its last round."""
    if not (folder / "events.jsonl").exists():
        return False
    last = next(iter(deque(read_records(folder), maxlen=1)), None)
    return isinstance(last, RoundRecord) and last.digest is not None


@dataclass(frozen=True)
class SummaryRow:
    """One row of the summary: runs that differ only in their seed."""

    group: tuple[tuple[str, str], ...]
    seeds: int
    accuracy: tuple[float, float]  # mean and standard deviation
    trained_accuracy: float | None  # mean, without filters that no device trained; None: all are
    rounds_to_target: float | None  # None: not every seed reached the target
    seconds_to_target: float | None
    seconds: float
    gigamacs: float  # per run
    megabytes: float  # per run, up and down
    utilisation: float
    lost_share: float  # share of tasks that were not merged
    best_accuracy: float  # mean over runs
    local_accuracy: float | None  # mean after local training, if devices have their own tests
    forward_gigamacs: float | None  # of forward passes on the clients of a split method
    total_gigamacs: float | None  # with the server's
    paper_megabytes: float | None  # four bytes per nonzero number
    c3: float = 0.0  # with the largest costs in the table as budgets


def summarise(sweep_runs: Sequence[SweepRun], folder: Path, target: float) -> list[SummaryRow]:
    """Return one row for each group of a finished sweep."""
    groups: dict[tuple[tuple[str, str], ...], list[list[RoundRecord]]] = {}
    for run in sweep_runs:
        records = read_records(folder / run.name)
        rounds = [record for record in records if isinstance(record, RoundRecord)]
        groups.setdefault(run.group, []).append(rounds)
    rows = [_summarise_group(group, runs, target) for group, runs in groups.items()]
    max_traffic = max((row.megabytes for row in rows), default=0.0)
    max_macs = max((row.gigamacs for row in rows), default=0.0)
    return [
        replace(
            row,
            c3=c3_score(
                row.accuracy[0],
                row.megabytes,
                row.gigamacs,
                max_traffic=max_traffic,
                max_macs=max_macs,
            ),
        )
        for row in rows
    ]


def _summarise_group(
    group: tuple[tuple[str, str], ...], runs: list[list[RoundRecord]], target: float
) -> SummaryRow:
    final = [run[-1].accuracy or 0.0 for run in runs]
    hits = [hit for run in runs if (hit := _find_target_round(run, target)) is not None]
    all_reached = len(hits) == len(runs)
    records = [record for run in runs for record in run]
    tasks = sum(record.tasks for record in records)
    return SummaryRow(
        group,
        len(runs),
        (statistics.fmean(final), statistics.stdev(final) if len(final) > 1 else 0.0),
        _average_trained_accuracy([run[-1] for run in runs]),
        statistics.fmean(hit.round + 1 for hit in hits) if all_reached else None,
        statistics.fmean(hit.seconds for hit in hits) if all_reached else None,
        statistics.fmean(run[-1].seconds for run in runs),
        sum(record.macs for record in records) / len(runs) / 1e9,
        sum(record.up + record.down for record in records) / len(runs) / 1e6,
        sum(record.useful for record in records) / sum(record.available for record in records),
        1 - sum(record.merged for record in records) / max(1, tasks),
        statistics.fmean(max(record.accuracy or 0.0 for record in run) for run in runs),
        _average_local_accuracy([run[-1] for run in runs]),
        *_average_exchange(runs),
    )


def _average_local_accuracy(last_rounds: list[RoundRecord]) -> float | None:
    personal = [record.personal for record in last_rounds if record.personal is not None]
    scores = [p.local_accuracy for p in personal if p.local_accuracy is not None]
    return statistics.fmean(scores) if scores else None


def _average_exchange(
    runs: list[list[RoundRecord]],
) -> tuple[float | None, float | None, float | None]:
    parts = [record.exchange for run in runs for record in run if record.exchange is not None]
    if not parts:
        return None, None, None
    forward = sum(part.forward for part in parts) / len(runs)
    server = sum(part.server for part in parts) / len(runs)
    nonzero = sum(part.nonzero for part in parts) / len(runs)
    return forward / 1e9, (forward + server) / 1e9, nonzero / 1e6


def _average_trained_accuracy(last_rounds: list[RoundRecord]) -> float | None:
    if all(record.trained_score is None for record in last_rounds):
        return None
    scores = [record.trained_score or record.score for record in last_rounds]
    return statistics.fmean(score.accuracy for score in scores if score is not None)


def _find_target_round(rounds: list[RoundRecord], target: float) -> RoundRecord | None:
    return next((record for record in rounds if (record.accuracy or 0.0) >= target), None)
