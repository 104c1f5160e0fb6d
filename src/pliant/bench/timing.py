"""Measurements and their limits: interleaved, or one function in a process of its own."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

from pliant.value import Value

T = TypeVar("T")
MIN_REPEATS = 5
BURST_SECONDS = 0.05  # short functions repeat this long, with warm caches as in a loop


class Measurement(Value, frozen=True):
    """A number and the limit that it must not exceed."""

    name: str
    value: float
    unit: str = ""
    limit: float | None = None  # None: only for comparison

    @property
    def is_met(self) -> bool:
        return self.limit is None or self.value <= self.limit


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each function, run in turn for `seconds`.

    With `time.process_time` as the clock, waiting for a busy core is not counted.
    """
    for run in functions.values():
        run()
    repeats = {
        name: max(1, math.ceil(BURST_SECONDS / _time_repeats(run, 1, clock)))
        for name, run in functions.items()
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < MIN_REPEATS:
        for name, run in functions.items():
            times[name].append(_time_repeats(run, repeats[name], clock) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def measure_ratio(
    function: Callable[[], object],
    reference: Callable[[], object],
    *,
    seconds: float,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the median ratio of the times of two functions, run in turn for `seconds`.

    Each ratio is of neighbouring runs, and their order alternates, so that a machine whose speed
    changes favours neither.
    """
    functions = (function, reference)
    for run in functions:
        run()
    repeats = [max(1, math.ceil(BURST_SECONDS / _time_repeats(run, 1, clock))) for run in functions]
    ratios: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(ratios) < MIN_REPEATS:
        times = [0.0, 0.0]
        for index in (0, 1) if len(ratios) % 2 else (1, 0):
            run, count = functions[index], repeats[index]
            times[index] = _time_repeats(run, count, clock) / count
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def _time_repeats(run: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        run()
    return clock() - start


def run_in_process(function: Callable[..., T], *arguments: object) -> T:
    """Return what a function returns in a new process with one thread."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,)) as pool:
        return pool.submit(function, *arguments).result()
