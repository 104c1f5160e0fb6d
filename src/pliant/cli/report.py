"""`pliant report`: write an HTML report on runs, with figures and tables."""

import shlex
import sys
from pathlib import Path


def report(*runs: Path, out: Path | None = None, target: float = 0.9) -> None:
    """Write a report on runs and print its path.

    Example: pliant report runs/methods

    Example: pliant report runs/fedavg runs/distreal --out compared

    Args:
        runs: Folders of runs, or folders that contain them.
        out: Folder of the report; by default RUN/report, or ./report for several folders.
        target: Accuracy for the columns that count rounds and seconds to the target.
    """
    from pliant.cli.progress import show_steps
    from pliant.extras import require
    from pliant.report.build import write_report

    if not runs:
        raise ValueError("Expected at least one folder of runs, like `pliant report runs/methods`")
    if not 0.0 < target <= 1.0:
        raise ValueError(f"Expected a target accuracy above 0 and up to 1, got {target}")
    folder = out or (runs[0] / "report" if len(runs) == 1 else Path("report"))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if out is not None and not existing.is_dir():  # before the figures are drawn
        raise NotADirectoryError(f"{existing}: expected a folder for the report, found a file")
    require("matplotlib", "report")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    with show_steps() as show_step:
        page = write_report(runs, folder, target=target, command=command, on_progress=show_step)
    sys.stdout.write(f"{page}\n")
