"""Time things against one another: interleaved in one run, medians, one thread."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

BURST = 0.05  # seconds in a row: short work is timed as in a loop, with warm caches


def interleaved(
    work: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each piece of work, run in turn until the time is over.

    With `time.process_time` as the clock, waiting for a core that others use is not counted.
    """
    for run in work.values():
        run()
    many = {name: max(1, math.ceil(BURST / _timed(run, 1, clock))) for name, run in work.items()}
    found: dict[str, list[float]] = {name: [] for name in work}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(next(iter(found.values()))) < least:
        for name, run in work.items():
            found[name].append(_timed(run, many[name], clock) / many[name])
    return {name: statistics.median(times) for name, times in found.items()}


def _timed(run: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(times):
        run()
    return clock() - start
