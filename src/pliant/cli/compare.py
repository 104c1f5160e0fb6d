"""`pliant compare`: all runs of a TOML file with a [matrix], and one table."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.compare import Member, Row


def compare(
    spec: Path,
    *overrides: str,
    out: Path | None = None,
    target: float = 0.9,
    tensorboard: bool = False,
    json: bool = False,
) -> None:
    """Run every combination of a file's [matrix] and print a table; finished runs are kept.

    Example: pliant compare methods.toml --target 0.95

    Parameters
    ----------
    spec
        A TOML file like that of `pliant run`, with a table [matrix] of keys and their values.
    overrides
        key=value in the place of what the file says, like rounds=20.
    out
        Folder of the comparison; runs/NAME by default.
    target
        The accuracy to which rounds and seconds are counted.
    tensorboard
        Write event files for TensorBoard too, into FOLDER/tensorboard of each run.
    json
        JSON lines instead of a table.
    """
    import msgspec

    from pliant.cli.progress import bar
    from pliant.compare import crew, is_finished, members, run_all, table
    from pliant.report.tensorboard import export

    if not 0.0 < target <= 1.0:
        raise ValueError(f"Expected a target accuracy above 0 and up to 1, got {target}")
    found = members(spec, overrides)
    workers = crew(found)
    folder = out or Path("runs") / spec.stem

    finished = [member for member in found if is_finished(folder / member.name, member)]
    names = [member.name for member in finished]
    with bar("runs", len(found), len(names)) as show:

        def tell(member: "Member") -> None:
            names.append(member.name)
            sys.stderr.write(f"finished {member.name} ({len(names)} of {len(found)})\n")
            show(len(names))

        try:
            run_all(found, folder.resolve(), workers, tell)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on from here") from None
    for member in found if tensorboard else ():
        export(folder / member.name)
    rows = table(found, folder, target)
    text = "".join(msgspec.json.encode(_plain(row)).decode() + "\n" for row in rows)
    sys.stdout.write(text if json else _table(rows, target))


def _plain(row: "Row") -> dict[str, object]:
    from dataclasses import asdict

    return asdict(row) | {"group": dict(row.group)}


def _table(rows: "list[Row]", target: float) -> str:
    names = [" ".join(value for _, value in row.group) for row in rows]
    width = max(map(len, names), default=0)
    head = (
        f"{'':{width}}  {'accuracy':>15}  {'trained':>7}  {f'rounds to {target:.0%}':>14}  "
        f"{'seconds':>8}  {'GMACs':>9}  {'MB':>8}  {'used':>5}  {'lost':>5}  {'best':>7}  "
        f"{'local':>7}  {'C3':>5}"
    )
    lines = [head]
    for name, row in zip(names, rows, strict=True):
        mean, spread = row.accuracy
        narrow = "" if row.narrow is None else f"{row.narrow:.2%}"
        local = "" if row.local is None else f"{row.local:.2%}"
        rounds = "-" if row.rounds_to is None else f"{row.rounds_to:.1f}"
        seconds = "-" if row.seconds_to is None else f"{row.seconds_to:.1f}"
        lines.append(
            f"{name:{width}}  {mean:7.2%} ± {spread:5.2%}  {narrow:>7}  {rounds:>14}  "
            f"{seconds:>8}  {row.gigamacs:9.1f}  {row.megabytes:8.1f}  {row.utilisation:5.0%}  "
            f"{row.lost:5.0%}  {row.best:7.2%}  {local:>7}  {row.c3:5.3f}"
        )
    return "\n".join(lines) + "\n"
