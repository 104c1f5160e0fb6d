"""`pliant server status`: the devices of a run, also while its server runs."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pliant.deploy.supervise.run_totals import DeviceTotals

HEADER = ("device", "online", "last seen", "MAC/s", "rows", "merged", "late", "rejected", "last")


def status(run: Path, *, json: bool = False) -> None:
    """Show a run's devices: who is online, how fast they are, and how their tasks ended.

    `rows` are the first and last row of the method's table that a device chose in its last task.

    Example: pliant server status runs/digits

    Args:
        run: Folder of the run.
        json: Print one JSON object instead of a table.
    """
    from pliant.cli.progress import print_json, print_line
    from pliant.deploy.server.presence import read_presence
    from pliant.deploy.supervise.run_totals import DeviceTotals, TotalsReader
    from pliant.storage.run_dir import read_config

    config, totals, presence = read_config(run), TotalsReader(run).read(), read_presence(run)
    now = time.time()
    numbers = sorted({*totals.devices, *presence.last_seen})
    devices = [
        _describe(
            number,
            totals.devices.get(number, DeviceTotals()),
            number in presence.online,
            presence.last_seen.get(number),
        )
        for number in numbers
    ]
    if json:
        rounds = {"rounds": totals.rounds, "planned": config["rounds"]}
        print_json(rounds | {"time": now, "seen_at": presence.written_at, "devices": devices})
        return
    age = f", seen {now - presence.written_at:.0f} s ago" if presence.written_at else ""
    known, size = len(presence.online), config["fleet"]["size"]
    print_line(
        f"{totals.rounds} rounds closed, {config['rounds']} planned; "
        f"{known} of {size} devices online{age}"
    )
    rows = [HEADER, *(_format(device, now) for device in devices)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        print_line("  ".join([*cells, row[-1]]))


def _describe(
    number: int, device: "DeviceTotals", is_online: bool, last_seen: float | None
) -> dict[str, Any]:
    outcomes = device.outcomes
    return {
        "device": number,
        "online": is_online,
        "last_seen": last_seen,
        "speed": device.speed,
        "rows": [min(device.rows), max(device.rows)] if device.rows else None,
        "merged": outcomes["finished"] + outcomes["partial"],
        "late": outcomes["late"],
        "rejected": outcomes["rejected"],
        "last_round": device.last_round,
        "last_outcome": device.last_outcome,
    }


def _format(device: dict[str, Any], now: float) -> tuple[str, ...]:
    seen, speed, rows = device["last_seen"], device["speed"], device["rows"]
    return (
        str(device["device"]),
        "yes" if device["online"] else "no",
        "-" if seen is None else f"{max(0.0, now - seen):.0f} s",
        "-" if speed is None else f"{speed:.2e}",
        "-" if rows is None else f"{rows[0]}-{rows[1]}",
        *(str(device[key]) for key in ("merged", "late", "rejected")),
        device["last_outcome"] or "-",
    )
