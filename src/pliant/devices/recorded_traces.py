"""Traces recorded on real devices, replayed from files."""

from typing import Annotated

from msgspec import Meta

from pliant.devices.piecewise import PiecewiseConstant, expand_patterns
from pliant.devices.recording_io import read_speeds, read_windows
from pliant.devices.synthetic_traces import TraceQuery
from pliant.value import Positive, Value


class RecordedTrace(Value, frozen=True, tag="recorded"):
    """Speeds from a CSV or JSON-lines file; device i replays recording i modulo their number.

    The file's columns or keys are `seconds`, `speed` and, if it holds several devices, `device`.

    >>> import tempfile
    >>> from pliant.devices import Fleet, RecordedTrace
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("seconds,speed\\n0,1.0\\n2,0.5\\n")
    ...     file.flush()
    ...     Fleet(size=1, speed=RecordedTrace(file.name)).device(0).work(0.0, 4.0)
    3.0
    """

    path: Annotated[str, Meta(min_length=1)]
    period: Positive | None = None

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        return expand_patterns(read_speeds(self.path, self.period), query.devices, start, length)


class RecordedAvailability(Value, frozen=True, tag="availability"):
    """On (speed 1) and off (0) from a FedScale availability file; device i replays entry i.

    >>> import tempfile
    >>> from pliant.devices import Fleet, RecordedAvailability
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     _ = file.write('[{"active": [1, 5], "inactive": [3, 6], "finish_time": 8}]')
    ...     file.flush()
    ...     Fleet(size=1, speed=RecordedAvailability(file.name)).device(0).work(0.0, 16.0)
    6.0
    """

    path: Annotated[str, Meta(min_length=1)]

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        return expand_patterns(read_windows(self.path), query.devices, start, length)
