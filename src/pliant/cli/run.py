"""`pliant run`: run an experiment from its TOML file, or resume one."""

import errno
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
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

    Example: pliant run --resume runs/digits rounds=40

    Args:
        spec: TOML file of the experiment.
        overrides: key=value pairs that override the file, like rounds=20 or fleet.size=50. A
            resumed run can only get more rounds, and only if earlier rounds do not depend on their
            number.
        out: Folder of the run; by default runs/NAME.
        resume: Folder of a run to resume, instead of a file.
        tensorboard: Also write TensorBoard event files to FOLDER/tensorboard.
        json: Print one JSON record per round instead of a table.
    """
    from pliant.cli.progress import print_line
    from pliant.experiment.build import (
        build_experiment,
        check_cut,
        check_simulated,
        run_experiment,
    )
    from pliant.experiment.config import start_run
    from pliant.report.tensorboard import write_tensorboard
    from pliant.storage.run_dir import remove_unused

    folder, experiment = _load_run(spec, overrides, out, resume)
    check_simulated(experiment)
    net, data = build_experiment(experiment)
    check_cut(experiment, net, data)
    advice = f"resume with `pliant run --resume {shlex.quote(str(folder))}`"
    try:
        with remove_unused(folder), _stop_after_round() as stop:
            if resume is None:
                start_run(folder, experiment)
                if not json:
                    print_line(f"writing to {folder}")
            rounds = run_experiment(
                experiment, net, data, workers=experiment.workers, folder=folder,
                is_stopped=stop.is_set,
            )  # fmt: skip
            if tensorboard:
                rounds = write_tensorboard(folder, rounds)
            last = _show_rounds(rounds, experiment, is_json=json)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {advice}\n")
        return 130
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise OSError(f"the disk is full; free some space and {advice}") from error
    if stop.is_set() and (last is None or last.digest is None):
        sys.stderr.write(f"stopped; {advice}\n")
        return 130
    if not json:
        print_line(_describe_end(folder))
    return 0


def _describe_end(folder: Path) -> str:
    """Return the totals of a finished run and the command that shows more."""
    from pliant.analysis.records import read_rounds
    from pliant.cli.progress import format_scores

    rounds = read_rounds(folder)
    last = rounds[-1]
    gigamacs = sum(record.macs for record in rounds) / 1e9
    megabytes = sum(record.up + record.down for record in rounds) / 1e6
    unit = "round" if last.staleness is None else "version"
    return (
        f"finished {len(rounds)} {unit}{'s' * (len(rounds) > 1)}, {last.seconds:.1f} s of virtual "
        f"time: {gigamacs:.1f} GMACs, {megabytes:.1f} MB sent{format_scores(last)}\n"
        f"next: pliant report {shlex.quote(str(folder))}"
    )


def _load_run(
    spec: Path | None, overrides: tuple[str, ...], out: Path | None, resume: Path | None
) -> "tuple[Path, Experiment]":
    """Return the folder and the experiment of a new run or of one to resume."""
    from pliant.deploy.settings import SETTINGS_FILE
    from pliant.experiment.config import load_experiment, load_run_config

    if resume is not None and spec is not None and "=" in str(spec):
        spec, overrides = None, (str(spec), *overrides)
    if (spec is None) == (resume is None):
        raise ValueError("Expected either a TOML file or --resume FOLDER")
    if resume is not None and out is not None:
        raise ValueError("Expected no --out with --resume: the run stays in its folder")
    if spec is not None:
        return out or Path("runs") / spec.stem, load_experiment(spec, overrides)
    assert resume is not None
    experiment = load_run_config(resume, overrides)
    if (resume / SETTINGS_FILE).exists():
        raise ValueError(f"{resume} is a run on real devices: resume it with `pliant server`")
    return resume, experiment


def _show_rounds(
    records: "Iterable[RoundRecord]", experiment: "Experiment", *, is_json: bool
) -> "RoundRecord | None":
    """Print the rounds of a run, and return the last one, if there is any."""
    from pliant.cli.progress import print_json, print_line, show_bar

    last, seconds = None, experiment.seconds
    label, total = ("rounds", experiment.rounds) if seconds is None else ("seconds", seconds)
    with show_bar(label, total) as show_count:
        for record in records:
            last, done = record, record.round + 1
            number = f"{done:>3}/{total}" if seconds is None else f"{done:>3}"
            print_json(record) if is_json else print_line(_format_round(record, number))
            show_count(done if seconds is None else record.seconds)
    return last


def _format_round(record: "RoundRecord", number: str) -> str:
    from pliant.cli.progress import format_scores

    return (
        f"{'round' if record.staleness is None else 'version'} {number}  {record.seconds:8.2f} s  "
        f"{record.merged:>2}/{record.tasks} devices  used {record.utilisation:4.0%}"
        f"{format_scores(record)}"
    )


@contextmanager
def _stop_after_round() -> Iterator[Event]:
    """Set an event on the first Ctrl-C, to stop with a checkpoint; on the second, stop at once."""
    stop = Event()

    def handle_signal(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        sys.stderr.write("stopping after this round (press Ctrl-C again to stop at once)\n")

    previous_handler = signal.signal(signal.SIGINT, handle_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous_handler)
