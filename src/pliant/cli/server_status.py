"""`pliant server status`: the devices of a run, also while its server runs."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.deploy.server.fleet_status import DeviceSummary

HEADER = (
    "device", "online", "last seen", "battery", "MAC/s", "rows", "MACs", "merged", "late",
    "rejected", "last",
)  # fmt: skip


def status(run: Path, *, json: bool = False) -> None:
    """Show a run's devices: who is online, how fast they are, and how their tasks ended.

    `rows` are the first and last row of the method's table that a device chose in its last task,
    `MACs` their cost as shares of the full network's.

    Example: pliant server status runs/digits

    Args:
        run: Folder of the run.
        json: Print one JSON object instead of a table.
    """
    from pliant.cli.progress import print_json, print_line
    from pliant.deploy.server.fleet_status import StatusReader

    fleet = StatusReader(run).read()
    if json:
        print_json(fleet)
        return
    age = f", seen {fleet.time - fleet.seen_at:.0f} s ago" if fleet.seen_at else ""
    print_line(
        f"{fleet.rounds} rounds closed, {fleet.planned} planned; "
        f"{fleet.online} of {fleet.size} devices online{age}"
    )
    rows = [HEADER, *(_format(device, fleet.time) for device in fleet.devices)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        print_line("  ".join([*cells, row[-1]]))


def _format(device: "DeviceSummary", now: float) -> tuple[str, ...]:
    seen, battery, speed, rows = device.last_seen, device.battery, device.speed, device.rows
    charging = "+" if battery is not None and battery.is_charging else ""
    return (
        str(device.device),
        "yes" if device.online else "no",
        "-" if seen is None else f"{max(0.0, now - seen):.0f} s",
        "-" if battery is None else f"{battery.charge:.0%}{charging}",
        "-" if speed is None else f"{speed:.2e}",
        "-" if rows is None else f"{rows[0]}-{rows[1]}",
        "-" if device.shares is None else "-".join(f"{share:.0%}" for share in device.shares),
        *map(str, (device.merged, device.late, device.rejected)),
        device.last_outcome or "-",
    )
