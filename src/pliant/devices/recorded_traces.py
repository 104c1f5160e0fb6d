"""Traces recorded on real devices, replayed from files.

Speeds come from CSV or JSON lines, on and off times from a FedScale availability file.
"""

import csv
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import numpy as np
from msgspec import Meta

from pliant.devices.piecewise import (
    PiecewiseConstant,
    SpeedPattern,
    expand_patterns,
    make_on_off_pattern,
)
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

    def __post_init__(self) -> None:
        if isinstance(self.path, Path):
            msgspec.structs.force_setattr(self, "path", str(self.path))
        Value.__post_init__(self)

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        patterns = read_speeds(self.path, self.period, read_stamp(self.path))
        return expand_patterns(patterns, query.devices, start, length)


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

    def __post_init__(self) -> None:
        if isinstance(self.path, Path):
            msgspec.structs.force_setattr(self, "path", str(self.path))
        Value.__post_init__(self)

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        patterns = read_windows(self.path, read_stamp(self.path))
        return expand_patterns(patterns, query.devices, start, length)


class SpeedSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a recording: from `seconds` on the device has this speed."""

    seconds: float
    speed: float
    device: str | int = ""


class Behaviour(msgspec.Struct, frozen=True):
    """One device of a FedScale availability file: on from `active[k]` to `inactive[k]`."""

    active: list[float]
    inactive: list[float]
    finish_time: float  # the period


def read_stamp(path: str) -> tuple[int, int]:
    """Return what changes with a file, so that a changed one is read again."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable recording, got {error.strerror}") from None
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=16)
def read_speeds(
    path: str, period: float | None, stamp: tuple[int, int]
) -> tuple[SpeedPattern, ...]:
    """Read a file's recordings, one per device, in the order of their first lines.

    A CSV file has a header `seconds,speed` or `device,seconds,speed`; a JSON-lines file (`.jsonl`,
    `.ndjson`) has these keys. Time counts from the earliest line of the file.
    """
    samples_by_device: dict[str, list[SpeedSample]] = {}
    for line, sample in _iter_samples(path):
        where = f"{path}, line {line}"
        if not math.isfinite(sample.seconds):
            raise ValueError(f"{where}: expected finite `seconds`, got {sample.seconds}")
        if not (math.isfinite(sample.speed) and sample.speed >= 0):
            raise ValueError(f"{where}: expected a finite `speed` >= 0, got {sample.speed}")
        samples = samples_by_device.setdefault(str(sample.device), [])
        if samples and sample.seconds <= samples[-1].seconds:
            raise ValueError(
                f"{where}: expected `seconds` above {samples[-1].seconds} "
                f"(the device's previous line), got {sample.seconds}"
            )
        samples.append(sample)
    if not samples_by_device:
        raise ValueError(f"{path}: expected at least one line of `seconds` and `speed`, got none")
    origin = min(samples[0].seconds for samples in samples_by_device.values())
    last = max(samples[-1].seconds for samples in samples_by_device.values()) - origin
    if period is not None and period <= last:
        raise ValueError(f"{path}: expected a period above {last} (its last line), got {period}")
    patterns = []
    for samples in samples_by_device.values():
        times = np.array([sample.seconds - origin for sample in samples])
        times[0] = 0.0  # before its first line a device has the speed of that line
        levels = np.array([sample.speed for sample in samples])
        patterns.append(SpeedPattern(times, levels, period or math.inf))
    return tuple(patterns)


def _iter_samples(path: str) -> Iterator[tuple[int, SpeedSample]]:
    is_json = Path(path).suffix in {".jsonl", ".ndjson"}
    with open(path, encoding="utf-8-sig", newline="") as file:
        for line, raw in _iter_json_lines(file) if is_json else _iter_csv_lines(file):
            try:
                yield line, msgspec.convert(raw, SpeedSample, strict=is_json)
            except msgspec.ValidationError as error:
                raise ValueError(f"{path}, line {line}: {error}, got {raw}") from None


def _iter_json_lines(file: TextIO) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(file, start=1):
        if text.strip():
            try:
                yield line, msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(f"{file.name}, line {line}: expected JSON, got {error}") from None


def _iter_csv_lines(file: TextIO) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(file)
    names = reader.fieldnames or []
    if not {"seconds", "speed"} <= set(names) <= {"device", "seconds", "speed"}:
        raise ValueError(
            f"{file.name}, line 1: expected the header `seconds,speed` or `device,seconds,speed`, "
            f"got {','.join(names)!r}"
        )
    for cells in reader:
        yield reader.line_num, cells


@lru_cache(maxsize=16)
def read_windows(path: str, stamp: tuple[int, int]) -> tuple[SpeedPattern, ...]:
    """Read the on/off windows of a FedScale availability file in JSON.

    The file holds an object of device to behaviour, or a list of behaviours.
    """
    try:
        behaviours: Any = msgspec.json.decode(
            Path(path).read_bytes(), type=dict[str, Behaviour] | list[Behaviour]
        )
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None
    if not behaviours:
        raise ValueError(f"{path}: expected at least one device, got none")
    items = behaviours.items() if isinstance(behaviours, dict) else enumerate(behaviours)
    patterns = []
    for name, behaviour in items:
        where, ons, offs = f"{path}, device {name}", behaviour.active, behaviour.inactive
        if len(ons) != len(offs):
            raise ValueError(
                f"{where}: expected as many `active` as `inactive` ({len(offs)}), got {len(ons)}"
            )
        windows = tuple(zip(ons, offs, strict=True))
        patterns.append(make_on_off_pattern(windows, behaviour.finish_time, where))
    return tuple(patterns)
