"""Kill a small run again and again, resume it, and compare it with an undisturbed run.

    python scripts/kill_resume.py --kills 200

Each process of the run is killed (SIGKILL) at a point of progress observed from outside: so many
records written, the records of a lost round removed, a checkpoint half written, a checkpoint just
written. When a run finishes, its last record and all of `events.jsonl` must equal those of the
undisturbed run, byte for byte; then the next run starts. A control follows, which must differ: a
run that is killed once and resumes from a checkpoint whose largest tensor was changed. `--folder`
keeps all files, and a second call with the same folder continues.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import IO, Protocol

FEDERATED = """
rounds = 18
per_round = 3
checkpoint_every = 3

[method]
type = "distreal"
local = { batch = 10, optimiser = { type = "sgd", lr = 0.05, clip = 5.0 } }

[fleet]
size = 400
speed = { type = "changing", low = 0.3, high = 1.1, per_round = 2.0 }

[rules]
late = "partial"
dropout = 0.1

[network]
name = "digits_cnn"
options = { hidden = 16 }

[evaluation]
every = 6
"""
SPLIT = """
rounds = 12
per_round = 3
checkpoint_every = 2

[method]
type = "adasplit"
cut = "features.2"
kappa = 0.3
elastic = true
local = { batch = 16 }

[fleet]
size = 3
speed = { type = "changing", low = 0.3, high = 1.1, per_round = 2.0 }

[rules]
late = "wait"

[data]
name = "digits"
proxy = 7880

[network]
name = "digits_cnn"
options = { hidden = 16 }

[evaluation]
every = 12
"""
ASYNCHRONOUS = """
rounds = 30
per_round = 3
checkpoint_every = 3

[method]
type = "fedbuff"
buffer = 2
concurrency = 6
inner = { type = "distreal", local = { batch = 10, optimiser = { type = "sgd", lr = 0.05 } } }

[fleet]
size = 400
speed = { type = "changing", low = 0.3, high = 1.1, per_round = 2.0 }

[rules]
dropout = 0.1

[network]
name = "digits_cnn"
options = { hidden = 16 }

[evaluation]
every = 10
"""
SPECS = {"asynchronous": ASYNCHRONOUS, "federated": FEDERATED, "split": SPLIT}
KILL_POINTS = ("records", "records", "truncated", "half saved", "saved")
WORKERS = {"inline": 'type="inline"', "processes": 'type="processes",count=2'}
TIMEOUT = 120.0  # seconds after which a process counts as hung
LOOK_SECONDS, SHORT_LOOK_SECONDS = 0.005, 0.0005  # half a checkpoint exists for a moment only
POLL_SECONDS = 0.05


class RunProcess(Protocol):
    """A process that runs pliant."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class ForkServer:
    """A process that has run a round and forks a run on request, which saves imports."""

    def __init__(self, kinds: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--fork-server", "--runs", *kinds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = 0
        self._code: int | None = None

    def start(self, *arguments: str) -> "ForkServer":
        self._write(json.dumps(arguments))
        self.pid, self._code = int(self._read()), None
        return self

    def poll(self) -> int | None:
        if self._code is None:
            self._write("poll")
            reply = self._read()
            self._code = None if reply == "alive" else int(reply)
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def close(self) -> None:
        _require_pipe(self._process.stdin).close()
        self._process.wait()
        _require_pipe(self._process.stdout).close()

    def _write(self, line: str) -> None:
        _require_pipe(self._process.stdin).write(line + "\n")
        _require_pipe(self._process.stdin).flush()

    def _read(self) -> str:
        return _require_pipe(self._process.stdout).readline().strip()


def _require_pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def serve_forks(kinds: list[str]) -> None:
    """Fork a run for each line of arguments, and report whether it has ended when polled."""
    import torch

    from pliant.cli import main

    torch.set_num_threads(1)  # threads do not survive a fork
    # one round imports, reads and checks once what every run needs
    with tempfile.TemporaryDirectory(prefix="pliant-kill-") as name, redirect_stdout(StringIO()):
        spec = Path(name) / "small.toml"
        workers = f"workers={{{WORKERS['inline']}}}"
        for kind in kinds:
            spec.write_text(SPECS[kind])
            if main(["run", str(spec), "rounds=1", workers, "--out", str(Path(name) / kind)]):
                raise SystemExit("the first round failed")

    pid = 0
    for line in sys.stdin:
        if line.strip() == "poll":
            ended, status = os.waitpid(pid, os.WNOHANG)
            sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n" if ended else "alive\n")
        else:
            pid = os.fork()
            if not pid:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(null, 1)
                os._exit(main(json.loads(line)))
            sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


class Processes:
    """Start each run as a user would."""

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "pliant", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        pass


class ProgressWatch:
    """Observe the files of a run, and decide when to kill it."""

    def __init__(self, folder: Path, kill_point: str, lines: int) -> None:
        self._records = folder / "events.jsonl"
        self._checkpoints = folder / "checkpoints"
        self._kill_point = kill_point
        self._lines = lines
        self._first_size = self._read_size()
        self._has_changed = False
        self._base = 0
        self._saved = self._list_names(".ckpt")
        self.look_seconds = SHORT_LOOK_SECONDS if kill_point == "half saved" else LOOK_SECONDS

    def is_due(self) -> bool:
        size = self._read_size()
        if not self._has_changed and size != self._first_size:
            self._has_changed = True
            self._base = min(size, self._first_size)
        match self._kill_point:
            case "records":  # since the process started, after what it has removed
                return self._has_changed and self._count_new_lines() >= self._lines
            case "truncated":
                return self._has_changed
            case "half saved":
                return bool(self._list_names(".tmp"))
            case _:
                return bool(self._list_names(".ckpt") - self._saved)

    def _read_size(self) -> int:
        return self._records.stat().st_size if self._records.exists() else 0

    def _count_new_lines(self) -> int:
        with open(self._records, "rb") as file:
            file.seek(self._base)
            return file.read().count(b"\n")

    def _list_names(self, ending: str) -> set[str]:
        if not self._checkpoints.is_dir():
            return set()
        return {name for name in os.listdir(self._checkpoints) if name.endswith(ending)}


def kill_when_due(process: RunProcess, watch: ProgressWatch) -> bool:
    """Kill a process at its kill point; return False if it ended before."""
    poll_at, deadline = 0.0, time.monotonic() + TIMEOUT
    while not watch.is_due():
        if time.monotonic() > poll_at:
            if process.poll() is not None:
                return False
            poll_at = time.monotonic() + POLL_SECONDS
        if time.monotonic() > deadline:
            os.kill(process.pid, signal.SIGKILL)
            raise SystemExit(f"a process hung for {TIMEOUT} s")
        time.sleep(watch.look_seconds)
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def read_result(folder: Path) -> tuple[str, bytes]:
    """Return the SHA-256 of the final network, and all records."""
    events = (folder / "events.jsonl").read_bytes()
    digest = json.loads(events.splitlines()[-1])["digest"]
    if digest is None:
        raise SystemExit(f"{folder}: the run is not finished")
    return digest, events


def change_checkpoint(folder: Path) -> None:
    """Change the largest tensor in the newest checkpoint."""
    from pliant.storage import checkpoint

    newest = checkpoint.load_newest(folder / "checkpoints")
    if newest is not None:
        generation, tensors, state = newest
        largest = max(tensors, key=lambda name: tensors[name].numel())
        tensors[largest] = tensors[largest] + 1
        checkpoint.save(folder / "checkpoints", generation, tensors, state)


@contextmanager
def open_folder(folder: Path | None) -> Iterator[Path]:
    """Yield the folder, or a temporary one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="pliant-kill-") as name:
        yield Path(name)


class KillTest:
    """Runs that are killed and resumed in one folder, and their progress."""

    def __init__(
        self, folder: Path, launcher: "Processes | ForkServer", kind: str, workers: str
    ) -> None:
        self._launcher = launcher
        self._run_folder = folder / "killed"
        self._progress = folder / "progress.json"
        spec = folder / "small.toml"
        spec.write_text(SPECS[kind])
        self._first_command = ("run", str(spec), f"workers={{{workers}}}", "--out")
        state = {"kills": 0, "runs": 0, "kinds": {}}
        if self._progress.exists():
            state = json.loads(self._progress.read_text())
        self.kills, self.runs = state["kills"], state["runs"]
        self.kill_points = Counter(state["kinds"])
        self.expected = self._run_undisturbed(folder / "undisturbed")

    def step(self, *, may_kill: bool) -> None:
        """Start or resume the run, until it is killed or finished."""
        rng = random.Random(f"{self.kills} {self.runs}")
        kill_point = KILL_POINTS[(self.kills + self.runs) % len(KILL_POINTS)]
        watch = ProgressWatch(self._run_folder, kill_point, rng.randint(1, 25))
        process = self._start(self._run_folder)
        if may_kill and kill_when_due(process, watch):
            self.kills += 1
            self.kill_points[kill_point] += 1
        else:
            _wait_for_success(process)
            result = read_result(self._run_folder)
            if result != self.expected:
                raise SystemExit(
                    f"after {self.kills} kills: expected {self.expected[0]}, got {result[0]}"
                )
            self.runs += 1
            shutil.rmtree(self._run_folder)
        state = {"kills": self.kills, "runs": self.runs, "kinds": self.kill_points}
        self._progress.write_text(json.dumps(state))

    def is_idle(self) -> bool:
        """Return whether no run is unfinished."""
        return not self._run_folder.exists()

    def check_control(self) -> None:
        """Kill a run once and resume it from a changed checkpoint: its result must differ."""
        watch = ProgressWatch(self._run_folder, "saved", 0)
        if not kill_when_due(self._start(self._run_folder), watch):
            raise SystemExit("the control was not killed")
        change_checkpoint(self._run_folder)
        _wait_for_success(self._start(self._run_folder))
        if read_result(self._run_folder)[0] == self.expected[0]:
            raise SystemExit("expected another result from a changed checkpoint, got the same")
        shutil.rmtree(self._run_folder)

    def _run_undisturbed(self, folder: Path) -> tuple[str, bytes]:
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _wait_for_success(self._start(folder))
            (folder / "done").touch()
        return read_result(folder)

    def _start(self, folder: Path) -> RunProcess:
        is_started = (folder / "config.json").exists()
        command = ("run", "--resume") if is_started else self._first_command
        return self._launcher.start(*command, str(folder))


def _wait_for_success(process: RunProcess) -> None:
    if code := process.wait():
        raise SystemExit(f"expected a process to end with exit code 0, got {code}")


def run_tests(folder: Path, options: argparse.Namespace) -> int:
    """Test each kind of run in a folder of its own; return the exit code."""
    launcher: Processes | ForkServer = ForkServer(options.runs) if options.fork else Processes()
    try:
        for kind in options.runs:
            (folder / kind).mkdir(exist_ok=True)
            if code := run_test(folder / kind, launcher, kind, options):
                return code
    finally:
        launcher.close()
    return 0


def run_test(
    folder: Path, launcher: Processes | ForkServer, kind: str, options: argparse.Namespace
) -> int:
    """Kill and resume until there were enough kills; return the exit code."""
    deadline = time.monotonic() + options.seconds
    test = KillTest(folder, launcher, kind, WORKERS[options.workers])
    while test.kills < options.kills or not test.is_idle():
        if time.monotonic() > deadline:
            sys.stdout.write(f"{test.kills} kills so far: call again with this folder\n")
            return 75  # EX_TEMPFAIL
        test.step(may_kill=test.kills < options.kills)
    test.check_control()
    kill_points = ", ".join(f"{count} {point}" for point, count in sorted(test.kill_points.items()))
    sys.stdout.write(
        f"{test.kills} kills ({kill_points}) in {test.runs} runs: one SHA-256, {test.expected[0]}, "
        "and the same records; another SHA-256 from a changed checkpoint\n"
    )
    return 0


def main() -> int:
    """Read the command line and run the test."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--runs", nargs="+", choices=sorted(SPECS), default=["federated"])
    parser.add_argument("--folder", type=Path, help="keep the runs here, and continue them")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after about this time")
    parser.add_argument("--workers", choices=sorted(WORKERS), default="inline")
    parser.add_argument("--fork", action="store_true", help="import once, fork each process")
    parser.add_argument("--fork-server", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fork_server:
        serve_forks(options.runs)
        return 0
    with open_folder(options.folder) as folder:
        return run_tests(folder, options)


if __name__ == "__main__":
    sys.exit(main())
