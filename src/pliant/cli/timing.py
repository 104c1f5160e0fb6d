"""Time things against one another: interleaved in one run, medians, one thread."""

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    work: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least: int = 5,
    tell: Callable[[float], None] | None = None,
) -> dict[str, float]:
    """Return the median seconds of each piece of work, run in turn until the time is over."""
    for run in work.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in work}
    begin = time.perf_counter()
    while True:
        for name, run in work.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
        spent = time.perf_counter() - begin
        rounds = len(next(iter(found.values())))
        if tell is not None:
            tell(min(1.0, spent / seconds, rounds / least) if rounds < least else spent / seconds)
        if spent >= seconds and rounds >= least:
            return {name: statistics.median(times) for name, times in found.items()}
