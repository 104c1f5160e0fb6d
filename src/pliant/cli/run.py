"""`pliant run`: one experiment from its TOML file, or go on with one that was interrupted."""

import errno
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.engine.ledger import RoundRecord

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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

    Parameters
    ----------
    spec
        The experiment's TOML file.
    overrides
        key=value in the place of what the file says, like rounds=20 or fleet.size=50.
    out
        Folder of the run; runs/NAME by default.
    resume
        Folder of a run to go on with, in the place of a file.
    tensorboard
        Write event files for TensorBoard too, into FOLDER/tensorboard.
    json
        One JSON record a round instead of a table.
    """
    import msgspec

    from pliant.cli.progress import bar
    from pliant.experiment import begin, build, load_experiment, recall, records
    from pliant.report.tensorboard import Board

    if resume is not None and (overrides or (spec is not None and "=" in str(spec))):
        raise ValueError("Expected no key=value with --resume: a run goes on as it began")
    if (spec is None) == (resume is None):
        raise ValueError("Expected either a TOML file or --resume FOLDER")
    if resume is not None:
        folder, experiment = resume, recall(resume)
        if (folder / "service.json").exists():
            raise ValueError(f"{folder} is a run on real devices: go on with `pliant server`")
        net, data = build(experiment)
    else:
        assert spec is not None
        experiment = load_experiment(spec, overrides)
        folder = out or Path("runs") / spec.stem
        net, data = build(experiment)  # before the folder: what cannot be built leaves none
        begin(folder, experiment)
    stop = _Stop()
    rounds = records(
        experiment,
        net,
        data,
        workers=experiment.workers,
        folder=folder,
        is_stopped=stop.asked,
    )
    go_on = f"go on with `pliant run --resume {folder}`"
    last = None
    board = Board(folder) if tensorboard else None
    try:
        with stop, bar("rounds", experiment.rounds) as show:
            for last in rounds:
                if json:
                    sys.stdout.write(msgspec.json.encode(last).decode() + "\n")
                else:
                    sys.stdout.write(_line(last, experiment.rounds))
                sys.stdout.flush()
                show(last.round + 1)
                if board:
                    board.add(last)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {go_on}\n")
        return 130
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise OSError(f"{error}; make room and {go_on}") from error
    finally:
        if board:
            board.close()
    if stop.asked() and (last is None or last.round + 1 < experiment.rounds):
        sys.stderr.write(f"stopped; {go_on}\n")
        return 130
    return 0


def _line(record: "RoundRecord", rounds: int) -> str:
    scored = "" if record.accuracy is None else f"  accuracy {record.accuracy:6.2%}"
    loss = "" if record.loss is None else f"  loss {record.loss:.3f}"
    return (
        f"round {record.round + 1:>3}/{rounds}  {record.seconds:8.2f} s  "
        f"{record.merged:>2}/{record.tasks} devices  used {record.utilisation:4.0%}{loss}{scored}\n"
    )


class _Stop:
    """The first Ctrl-C ends the run after its round, with a checkpoint; the second at once."""

    def __init__(self) -> None:
        self._is_asked = False

    def asked(self) -> bool:
        return self._is_asked

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._heard)

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        sys.stderr.write("stopping after this round (Ctrl-C again: at once)\n")
