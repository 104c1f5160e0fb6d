"""Sweeps: run every combination of a file's [matrix].

The runs share everything that the matrix does not vary, including data, traces and their order.
"""

import gc
import itertools
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records
from pliant.experiment.build import build_experiment, check_simulated, run_experiment
from pliant.experiment.config import (
    Experiment,
    decode_experiment,
    load_run_config,
    read_toml,
    start_run,
)
from pliant.params import Params
from pliant.storage.run_dir import CONFIG_FILE, remove_unused
from pliant.suggestions import did_you_mean
from pliant.value import describe_difference, encode
from pliant.workers.pool import AnyWorkers, InlineWorkers, ProcessWorkers, open_pool


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its values on the axes of the matrix, and its experiment."""

    axis_values: tuple[tuple[str, str], ...]
    experiment: Experiment

    @property
    def name(self) -> str:
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
    runs = [_make_run(path, raw, combination) for combination in itertools.product(*axes)]
    names = Counter(run.name for run in runs)
    if (repeated := names.most_common(1)) and repeated[0][1] > 1:
        raise ValueError(f"{path}: expected a folder for each run, got two named {repeated[0][0]}")
    return runs


def select_runs(runs: Sequence[SweepRun], only: Sequence[str]) -> list[SweepRun]:
    """Return the runs with one of the wanted values, like method=small, on every axis named."""
    wanted: dict[str, set[str]] = {}
    for pair in only:
        key, _, value = pair.partition("=")
        known = {value for run in runs for axis, value in run.axis_values if axis == key}
        if value not in known:
            pairs = [f"{key}={value}" for run in runs for key, value in run.axis_values]
            raise ValueError(
                f"Expected --only with a value of the [matrix], got {pair!r}"
                f"{did_you_mean(pair, dict.fromkeys(pairs))}"
            )
        wanted.setdefault(key, set()).add(value)
    return [
        run
        for run in runs
        if all(dict(run.axis_values)[key] in values for key, values in wanted.items())
    ]


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
    try:
        for key, name, value in combination:
            axis_values.append((key, name))
            raw = _set_value(raw, key.split("."), value)
        return SweepRun(tuple(axis_values), decode_experiment(raw, path.parent))
    except ValueError as error:
        values = ", ".join(f"{key} = {name}" for key, name in axis_values)
        raise ValueError(f"{path} with {values or 'no matrix'}: {error}") from None


def _set_value(raw: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    first, *rest = keys
    if rest:
        table = raw.get(first, {})
        if not isinstance(table, dict):
            raise ValueError(f"Expected a table at `{first}`, got {table!r}")
        return raw | {first: _set_value(table, rest, value)}
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
) -> list[str]:
    """Run or resume the unfinished runs in parallel, unless the folder holds other experiments.

    Return their warnings, which would come without the name of the run.
    """
    if (folder / CONFIG_FILE).exists():
        raise FileExistsError(f"{folder} already holds a run: choose another folder for a sweep")
    started = [run for run in runs if (folder / run.name / CONFIG_FILE).exists()]
    for run in started:
        _check_config(folder / run.name, run.experiment)
    unfinished = [run for run in runs if not is_finished(folder / run.name)]
    for run in unfinished:
        check_simulated(run.experiment)
    with remove_unused(*(folder / run.name for run in unfinished)):
        for run in unfinished:
            if run not in started:
                start_run(folder / run.name, run.experiment)
        with open_pool(workers, _skip_setup, partial(_run_one, folder)) as pool:
            warnings = pool.run(unfinished, {}, on_finish=on_finish)
    return [
        f"{run.name}: {text}"
        for run, texts in zip(unfinished, warnings, strict=True)
        for text in texts
    ]


def resolve_workers(runs: Sequence[SweepRun]) -> AnyWorkers:
    """Return the workers of a sweep, which must be the same for all runs."""
    kinds = list(dict.fromkeys(run.experiment.workers for run in runs))
    if len(kinds) > 1:
        raise ValueError(f"Expected the same workers for all runs of a sweep, got {kinds}")
    return kinds[0] if kinds else ProcessWorkers()


def _check_config(run_folder: Path, experiment: Experiment) -> None:
    """Refuse a folder with another experiment; neither workers nor [search] change a result."""
    old, new = (
        encode(msgspec.structs.replace(config, workers=InlineWorkers(), search=None))
        for config in (load_run_config(run_folder), experiment)
    )
    if difference := describe_difference(old, new):
        raise ValueError(
            f"{run_folder} holds a run with {difference}: choose another folder, "
            "or move this one aside with `pliant compare --fresh`"
        )


def _skip_setup() -> None:
    return None


def _run_one(folder: Path, context: None, shared: Params, run: SweepRun) -> list[str]:
    experiment = run.experiment
    net, data = build_experiment(experiment)
    rounds = run_experiment(
        experiment, net, data, workers=InlineWorkers(), folder=folder / run.name
    )
    with _collect_warnings() as warnings:
        deque(rounds, maxlen=0)  # runs to the end
    del net, data, rounds
    gc.collect()  # a traced network has reference cycles, which would keep its tensors alive
    return warnings


@contextmanager
def _collect_warnings() -> Iterator[list[str]]:
    """Collect what is logged; without a handler, it would be printed across the progress bar."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pliant")
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)


def is_finished(folder: Path) -> bool:
    """Return whether a run has recorded its last round."""
    if not (folder / "events.jsonl").exists():
        return False
    last = next(iter(deque(read_records(folder), maxlen=1)), None)
    return isinstance(last, RoundRecord) and last.digest is not None
