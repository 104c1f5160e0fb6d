"""`pliant report`: one HTML file about runs, with pictures and tables beside it."""

import shlex
import sys
from pathlib import Path


def report(*runs: Path, out: Path | None = None, target: float = 0.9) -> None:
    """Write a report about runs and print where it is.

    Example: pliant report runs/methods

    Example: pliant report runs/fedavg runs/distreal --out compared

    Parameters
    ----------
    runs
        Folders of runs, or folders that hold such folders.
    out
        Folder of the report; RUN/report by default, or ./report for several folders.
    target
        The accuracy to which rounds and seconds are counted.
    """
    from pliant.cli.progress import steps
    from pliant.report.build import write_report

    if not runs:
        raise ValueError("Expected at least one folder of runs, like `pliant report runs/methods`")
    if not 0.0 < target <= 1.0:
        raise ValueError(f"Expected a target accuracy above 0 and up to 1, got {target}")
    folder = out or (runs[0] / "report" if len(runs) == 1 else Path("report"))
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    with steps() as tell:
        page = write_report(runs, folder, target=target, command=command, tell=tell)
    sys.stdout.write(f"{page}\n")
