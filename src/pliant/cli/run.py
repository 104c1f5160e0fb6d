"""`pliant run`: run an experiment from its TOML file, or resume one."""

import errno
import signal
import sys
from collections.abc import Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.engine.ledger import RoundRecord
    from pliant.experiment.config import Experiment

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run(
    spec: Path | None = None,
    *overrides: str,
    out: Path | None = None,
    resume: Path | None = None,
    tensorboard: bool = False,
    json: bool = False,
) -> int:
    """Run an experiment and write its records and checkpoints to a folder.

    Example: pliant run digits.toml rounds=20 method.local.batch=64

    Example: pliant run --resume runs/digits

    Args:
        spec: TOML file of the experiment.
        overrides: key=value pairs that override the file, like rounds=20 or fleet.size=50.
        out: Folder of the run; by default runs/NAME.
        resume: Folder of a run to resume, instead of a file.
        tensorboard: Also write TensorBoard event files to FOLDER/tensorboard.
        json: Print one JSON record per round instead of a table.
    """
    from pliant.experiment.build import build_experiment, run_experiment
    from pliant.experiment.config import start_run

    folder, experiment = _load_run(spec, overrides, out, resume)
    net, data = build_experiment(experiment)
    if resume is None:  # not earlier, so that an experiment that cannot be built leaves no folder
        start_run(folder, experiment)
    stop = _InterruptHandler()
    rounds = run_experiment(
        experiment, net, data, workers=experiment.workers, folder=folder, is_stopped=stop.is_set
    )
    advice = f"resume with `pliant run --resume {folder}`"
    board_folder = folder if tensorboard else None
    try:
        with stop:
            done = _show_rounds(rounds, experiment.rounds, board_folder, is_json=json)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {advice}\n")
        return 130
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise OSError(f"{error}; free some space and {advice}") from error
    if stop.is_set() and (done is None or done < experiment.rounds):
        sys.stderr.write(f"stopped; {advice}\n")
        return 130
    return 0


def _load_run(
    spec: Path | None, overrides: tuple[str, ...], out: Path | None, resume: Path | None
) -> "tuple[Path, Experiment]":
    """Return the folder and the experiment of a new run or of one to resume."""
    from pliant.deploy.constants import SETTINGS_FILE
    from pliant.experiment.config import load_experiment, load_run_config

    if resume is not None and (overrides or (spec is not None and "=" in str(spec))):
        raise ValueError("Expected no key=value with --resume: a resumed run keeps its settings")
    if (spec is None) == (resume is None):
        raise ValueError("Expected either a TOML file or --resume FOLDER")
    if spec is not None:
        return out or Path("runs") / spec.stem, load_experiment(spec, overrides)
    assert resume is not None
    experiment = load_run_config(resume)
    if (resume / SETTINGS_FILE).exists():
        raise ValueError(f"{resume} is a run on real devices: resume it with `pliant server`")
    return resume, experiment


def _show_rounds(
    records: "Iterable[RoundRecord]", rounds: int, board_folder: Path | None, *, is_json: bool
) -> int | None:
    """Print the rounds of a run, and return the number of the last one, if there is any."""
    import msgspec

    from pliant.cli.progress import show_bar
    from pliant.report.tensorboard import TensorBoardWriter

    done = None
    board = TensorBoardWriter(board_folder) if board_folder else None
    with closing(board) if board else nullcontext(), show_bar("rounds", rounds) as show_count:
        for record in records:
            line = msgspec.json.encode(record).decode() + "\n"
            sys.stdout.write(line if is_json else _format_round(record, rounds))
            sys.stdout.flush()
            done = record.round + 1
            show_count(done)
            if board:
                board.add(record)
    return done


def _format_round(record: "RoundRecord", rounds: int) -> str:
    from pliant.cli.progress import format_scores

    return (
        f"round {record.round + 1:>3}/{rounds}  {record.seconds:8.2f} s  "
        f"{record.merged:>2}/{record.tasks} devices  used {record.utilisation:4.0%}"
        f"{format_scores(record)}\n"
    )


class _InterruptHandler:
    """Stop after the round, with a checkpoint, on the first Ctrl-C; at once on the second."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def __enter__(self) -> None:
        self._previous_handler = signal.signal(signal.SIGINT, self._handle_signal)

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
        sys.stderr.write("stopping after this round (press Ctrl-C again to stop at once)\n")
