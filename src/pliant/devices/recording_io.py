"""Readers of device recordings: speeds (CSV, JSON lines) and on/off times (FedScale)."""

import csv
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from pliant.devices.piecewise import SpeedPattern, make_on_off_pattern


class SpeedSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a recording: from `seconds` on the device has this speed."""

    seconds: float
    speed: float
    device: str | int = ""


class Behaviour(msgspec.Struct, frozen=True):
    """One device of a FedScale availability file: on from `active[k]` to `inactive[k]`."""

    active: list[float]
    inactive: list[float]
    finish_time: float
    duration: float = 0.0  # the sum of the windows; unused
    model: str = ""


def read_speeds(path: str, period: float | None) -> list[SpeedPattern]:
    """Read a file's recordings, one per device, in the order of their first lines.

    A CSV file has a header `seconds,speed` or `device,seconds,speed`; a JSON-lines file (`.jsonl`,
    `.ndjson`) has these keys. Time counts from the earliest line of the file.
    """
    return list(_read_speeds_cached(path, period, _read_stamp(path)))


def read_windows(path: str) -> list[SpeedPattern]:
    """Read the on/off windows of a FedScale availability file in JSON.

    The file holds an object of device to behaviour, or a list of behaviours. A behaviour has the
    fields `active`, `inactive`, `finish_time` (the period) and, unused, `duration` and `model`.
    """
    return list(_read_windows_cached(path, _read_stamp(path)))


@lru_cache(maxsize=16)
def _read_speeds_cached(
    path: str, period: float | None, stamp: tuple[int, int]
) -> tuple[SpeedPattern, ...]:
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
    return tuple(_make_pattern(samples, origin, period) for samples in samples_by_device.values())


def _make_pattern(samples: list[SpeedSample], origin: float, period: float | None) -> SpeedPattern:
    times = np.array([sample.seconds - origin for sample in samples])
    times[0] = 0.0  # before its first line a device has the speed of that line
    return SpeedPattern(times, np.array([sample.speed for sample in samples]), period or math.inf)


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
def _read_windows_cached(path: str, stamp: tuple[int, int]) -> tuple[SpeedPattern, ...]:
    try:
        behaviours: Any = msgspec.json.decode(
            Path(path).read_bytes(), type=dict[str, Behaviour] | list[Behaviour]
        )
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None
    items = behaviours.items() if isinstance(behaviours, dict) else enumerate(behaviours)
    patterns = tuple(
        _convert_behaviour(behaviour, f"{path}, device {name}") for name, behaviour in items
    )
    if not patterns:
        raise ValueError(f"{path}: expected at least one device, got none")
    return patterns


def _convert_behaviour(behaviour: Behaviour, where: str) -> SpeedPattern:
    active, inactive = behaviour.active, behaviour.inactive
    if len(active) != len(inactive):
        raise ValueError(
            f"{where}: expected as many `active` as `inactive` ({len(inactive)}), got {len(active)}"
        )
    windows = tuple(zip(active, inactive, strict=True))
    return make_on_off_pattern(windows, behaviour.finish_time, where)


def _read_stamp(path: str) -> tuple[int, int]:
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable recording, got {error.strerror}") from None
    return stat.st_mtime_ns, stat.st_size
