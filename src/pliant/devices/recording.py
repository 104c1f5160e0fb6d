"""Recordings of devices read from files: speeds (CSV, JSON lines), on/off times (FedScale)."""

import csv
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TextIO

import msgspec
import numpy as np

from pliant.devices.draws import FloatArray


class Pattern(NamedTuple):
    """One device's speeds from time 0 on, which repeat after `period` seconds (infinity: never)."""

    times: FloatArray  # ascending, the first is 0
    levels: FloatArray
    period: float = math.inf


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a recording: from `seconds` on the device has this speed."""

    seconds: float
    speed: float
    device: str | int = ""


class Behaviour(msgspec.Struct, frozen=True):
    """One device of a FedScale availability file: on from `active[k]` to `inactive[k]`."""

    active: list[float]
    inactive: list[float]
    finish_time: float
    duration: float = 0.0  # the sum of the windows, which is not needed here
    model: str = ""


def read_speeds(path: str, period: float | None) -> list[Pattern]:
    """Read the recordings of a file, one a device, in the order of their first line.

    A CSV file has a header `seconds,speed` or `device,seconds,speed`; a JSON-lines file (`.jsonl`,
    `.ndjson`) has these keys. Time counts from the earliest line of the file.
    """
    return list(_speeds(path, period, _stamp(path)))


def read_windows(path: str) -> list[Pattern]:
    """Read the on/off windows of a FedScale availability file written as JSON.

    The file holds one object, device to behaviour, or a list of behaviours; a behaviour has the
    fields `active`, `inactive`, `finish_time` (the period) and, unused, `duration` and `model`.
    """
    return list(_windows(path, _stamp(path)))


@lru_cache(maxsize=16)
def _speeds(path: str, period: float | None, stamp: tuple[int, int]) -> tuple[Pattern, ...]:
    rows: dict[str, list[Row]] = {}
    for line, row in _lines(path):
        where = f"{path}, line {line}"
        if not math.isfinite(row.seconds):
            raise ValueError(f"{where}: expected finite `seconds`, got {row.seconds}")
        if not (math.isfinite(row.speed) and row.speed >= 0):
            raise ValueError(f"{where}: expected a finite `speed` >= 0, got {row.speed}")
        known = rows.setdefault(str(row.device), [])
        if known and row.seconds <= known[-1].seconds:
            wanted = f"`seconds` above {known[-1].seconds} (the device's line before)"
            raise ValueError(f"{where}: expected {wanted}, got {row.seconds}")
        known.append(row)
    if not rows:
        raise ValueError(f"{path}: expected at least one line of `seconds` and `speed`, got none")
    origin = min(known[0].seconds for known in rows.values())
    last = max(known[-1].seconds for known in rows.values()) - origin
    if period is not None and period <= last:
        raise ValueError(f"{path}: expected a period above {last} (its last line), got {period}")
    return tuple(_pattern(known, origin, period) for known in rows.values())


def _pattern(rows: list[Row], origin: float, period: float | None) -> Pattern:
    times = np.array([row.seconds - origin for row in rows])
    times[0] = 0.0  # before its first line a device has the speed of that line
    return Pattern(times, np.array([row.speed for row in rows]), period or math.inf)


def _lines(path: str) -> Iterator[tuple[int, Row]]:
    is_json = FilePath(path).suffix in {".jsonl", ".ndjson"}
    with open(path, encoding="utf-8-sig", newline="") as file:
        for line, raw in _json_lines(file) if is_json else _csv_lines(file):
            try:
                yield line, msgspec.convert(raw, Row, strict=is_json)
            except msgspec.ValidationError as error:
                raise ValueError(f"{path}, line {line}: {error}, got {raw}") from None


def _json_lines(file: TextIO) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(file, start=1):
        if text.strip():
            try:
                yield line, msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(f"{file.name}, line {line}: expected JSON, got {error}") from None


def _csv_lines(file: TextIO) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(file)
    names = reader.fieldnames or []
    if not {"seconds", "speed"} <= set(names) <= {"device", "seconds", "speed"}:
        wanted = "`seconds,speed` or `device,seconds,speed`"
        raise ValueError(
            f"{file.name}, line 1: expected the header {wanted}, got {','.join(names)!r}"
        )
    for cells in reader:
        yield reader.line_num, cells


@lru_cache(maxsize=16)
def _windows(path: str, stamp: tuple[int, int]) -> tuple[Pattern, ...]:
    kind = dict[str, Behaviour] | list[Behaviour]
    try:
        behaviours: Any = msgspec.json.decode(FilePath(path).read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None
    named = behaviours.items() if isinstance(behaviours, dict) else enumerate(behaviours)
    patterns = tuple(_on_off(one, f"{path}, device {name}") for name, one in named)
    if not patterns:
        raise ValueError(f"{path}: expected at least one device, got none")
    return patterns


def _on_off(one: Behaviour, where: str) -> Pattern:
    if len(one.active) != len(one.inactive):
        wanted = f"as many `active` as `inactive` ({len(one.inactive)})"
        raise ValueError(f"{where}: expected {wanted}, got {len(one.active)}")
    return on_off(tuple(zip(one.active, one.inactive, strict=True)), one.finish_time, where)


def on_off(windows: tuple[tuple[float, float], ...], period: float, where: str) -> Pattern:
    """Return the pattern with speed 1 inside the windows and 0 outside, or say what is wrong."""
    if not period > 0:
        raise ValueError(f"{where}: expected a period above 0, got {period}")
    times, levels, last = [0.0], [0.0], 0.0
    for on, off in windows:
        if not last <= on <= off <= period:
            wanted = f"windows in order, none past {period}"
            raise ValueError(f"{where}: expected {wanted}, got {on} to {off} after {last}")
        times += [on, off]
        levels += [1.0, 0.0]
        last = off
    return Pattern(np.array(times), np.array(levels), period)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = FilePath(path).stat()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable recording, got {error.strerror}") from None
    return found.st_mtime_ns, found.st_size
