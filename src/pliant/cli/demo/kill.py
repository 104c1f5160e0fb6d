"""A run of the demo that is killed and resumed."""

import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

import pliant as pl

if TYPE_CHECKING:
    from pliant.experiment.sweep import SweepRun

KILL_AFTER = 3  # rounds
POLL_SECONDS = 0.02
MAX_SECONDS = 600.0  # of a process
TEXT = (
    "One of these runs (FedAvg, waits) once more, in a process that is killed (SIGKILL) in "
    "mid-run and then resumed from its last checkpoint."
)


@dataclass(frozen=True)
class KilledRun:
    """A run that was killed and resumed, and the same run undisturbed."""

    command: str  # that resumed it
    rounds_before: int  # recorded when it was killed
    rounds: int
    digest: str  # SHA-256 of the final network
    undisturbed: str  # likewise


def run_killed(run: "SweepRun", undisturbed: Path, folder: Path) -> KilledRun:
    """Start a run, kill it, resume it, and compare it with the undisturbed one."""
    from pliant.engine.run_store import EVENTS_FILE
    from pliant.experiment.config import start_run

    shutil.rmtree(folder, ignore_errors=True)
    # how often a run is saved does not change its result
    start_run(folder, replace(run.experiment, workers=pl.InlineWorkers(), checkpoint_every=2))
    command = [sys.executable, "-m", "pliant", "run", "--resume", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _wait_for_rounds(folder / EVENTS_FILE, process)
        finally:
            process.kill()
    rounds_before = len(_read_rounds(folder))
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(f"the resumed run failed: {completed.stderr.strip()}")
    rounds = _read_rounds(folder)
    return KilledRun(
        f"pliant run --resume {shlex.quote(str(folder))}",
        rounds_before,
        len(rounds),
        rounds[-1].digest or "",
        _read_rounds(undisturbed)[-1].digest or "",
    )


def _wait_for_rounds(events: Path, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a run has recorded enough rounds, or has ended."""
    end = time.monotonic() + MAX_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if events.exists() and events.read_bytes().count(b'"type":"round"') >= KILL_AFTER:
            return
        time.sleep(POLL_SECONDS)


def _read_rounds(folder: Path) -> "list[pl.RoundRecord]":
    from pliant.engine.run_store import read_records

    return [record for record in read_records(folder) if isinstance(record, pl.RoundRecord)]


def describe_killed_run(run: KilledRun) -> str:
    """Return when a run was killed, and whether its result is that of the undisturbed run."""
    before = f"after {run.rounds_before} of {run.rounds} rounds"
    killed = f"Killed {before}" if run.rounds_before < run.rounds else "It ended before the kill"
    is_same = run.digest == run.undisturbed
    return (
        f"{killed}, resumed by `{run.command}`.\n"
        f"   SHA-256, resumed:     {run.digest}\n"
        f"   SHA-256, undisturbed: {run.undisturbed}\n"
        f"{'The same network, bit for bit.' if is_same else 'They differ: please report this.'}"
    )
