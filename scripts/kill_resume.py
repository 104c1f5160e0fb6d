"""Kill a small run again and again, resume it, and compare it with one that was left alone.

    python scripts/kill_resume.py --kills 200

Every life of the run ends by SIGKILL at progress that is observed from outside: so many records
written, the records of a lost round cut off, a checkpoint half written, a checkpoint just there.
When a run gets through, its last record and all of `events.jsonl` must be those of the undisturbed
run, byte for byte, and the next run begins. At last a control, which must differ: a run that is
killed once and goes on from a checkpoint in which the largest tensor was changed. `--folder` keeps
everything there, and goes on from it when called again.
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
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Protocol

FEDERATED = """
rounds = 18
per_round = 3
checkpoint_every = 3

[method]
type = "distreal"
local = { batch = 10 }

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
rounds = 18
per_round = 3
checkpoint_every = 3

[method]
type = "adasplit"
cut = "features.2"
kappa = 0.3
elastic = true
local = { batch = 16 }

[fleet]
size = 3
speed = { type = "changing", low = 0.3, high = 1.1, per_round = 2.0 }

[data]
name = "digits"
proxy = 7880

[network]
name = "digits_cnn"
options = { hidden = 16 }

[evaluation]
every = 18
"""
SPECS = {"federated": FEDERATED, "split": SPLIT}
KINDS = ("records", "records", "cut off", "half saved", "saved")
WORKERS = {"inline": 'type="inline"', "processes": 'type="processes",count=2'}
A_LIFE = 120.0  # seconds after which a life is taken to hang


class Life(Protocol):
    """A run under way in a process of its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Nursery:
    """A process that has imported everything and forks a life when asked: no import each time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = 0
        self._code: int | None = None

    def start(self, *arguments: str) -> "Nursery":
        self._put(json.dumps(arguments))
        self.pid, self._code = int(self._get()), None
        return self

    def poll(self) -> int | None:
        if self._code is None:
            self._put("poll")
            answer = self._get()
            self._code = None if answer == "alive" else int(answer)
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait()
        _pipe(self._process.stdout).close()

    def _put(self, line: str) -> None:
        _pipe(self._process.stdin).write(line + "\n")
        _pipe(self._process.stdin).flush()

    def _get(self) -> str:
        return _pipe(self._process.stdout).readline().strip()


def _pipe(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def nursery() -> None:
    """Fork a life for each line of arguments, and tell whether it is over when polled."""
    for name in ("engine.simulate", "experiment", "cli.run"):
        import_module(f"pliant.{name}")
    import torch

    from pliant.cli import main
    from pliant.nn.elastic import elastic
    from pliant.nn.models import digits_cnn

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    elastic(digits_cnn(), torch.zeros(1, 1, 28, 28))  # what the first trace imports

    pid = 0
    for line in sys.stdin:
        if line.strip() == "poll":
            found, status = os.waitpid(pid, os.WNOHANG)
            sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n" if found else "alive\n")
        else:
            pid = os.fork()
            if not pid:
                quiet = os.open(os.devnull, os.O_RDWR)
                os.dup2(quiet, 0)
                os.dup2(quiet, 1)
                os._exit(main(json.loads(line)))
            sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


class Processes:
    """Start each life as a user does."""

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "pliant", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        pass


class Watch:
    """What can be seen of a run from outside, and when a kill of some kind is due."""

    def __init__(self, folder: Path, kind: str, lines: int) -> None:
        self._records = folder / "events.jsonl"
        self._checkpoints = folder / "checkpoints"
        self._kind = kind
        self._lines = lines
        self._first = self._size()
        self._changed = False
        self._base = 0
        self._saved = self._names(".ckpt")

    def is_due(self) -> bool:
        size = self._size()
        if not self._changed and size != self._first:
            self._changed = True
            self._base = min(size, self._first)
        match self._kind:
            case "records":  # since the life began, behind what it has cut off
                return self._changed and self._grown() >= self._lines
            case "cut off":
                return self._changed
            case "half saved":
                return bool(self._names(".tmp"))
            case _:
                return bool(self._names(".ckpt") - self._saved)

    def _size(self) -> int:
        return self._records.stat().st_size if self._records.exists() else 0

    def _grown(self) -> int:
        with open(self._records, "rb") as file:
            file.seek(self._base)
            return file.read().count(b"\n")

    def _names(self, ending: str) -> set[str]:
        if not self._checkpoints.is_dir():
            return set()
        return {name for name in os.listdir(self._checkpoints) if name.endswith(ending)}


def killed(life: Life, watch: Watch) -> bool:
    """Kill a life when it is due; return False if it was over before."""
    end = time.monotonic() + A_LIFE
    while not watch.is_due():
        if life.poll() is not None:
            return False
        if time.monotonic() > end:
            os.kill(life.pid, signal.SIGKILL)
            raise SystemExit(f"a life hung for {A_LIFE} s")
        time.sleep(0.0005)
    with suppress(ProcessLookupError):
        os.kill(life.pid, signal.SIGKILL)
    return life.wait() == -signal.SIGKILL


def outcome(folder: Path) -> tuple[str, bytes]:
    """Return the SHA-256 of the final network, and all records."""
    events = (folder / "events.jsonl").read_bytes()
    digest = json.loads(events.splitlines()[-1])["digest"]
    if digest is None:
        raise SystemExit(f"{folder}: the run has no end")
    return digest, events


def spoil(folder: Path) -> None:
    """Change the largest tensor in the newest checkpoint."""
    from pliant import checkpoint

    found = checkpoint.newest(folder / "checkpoints")
    if found is not None:
        number, tensors, state = found
        largest = max(tensors, key=lambda name: tensors[name].numel())
        tensors[largest] = tensors[largest] + 1
        checkpoint.save(folder / "checkpoints", number, tensors, state)


@contextmanager
def workplace(folder: Path | None) -> Iterator[Path]:
    """Give a folder that goes away, unless one is named."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="pliant-kill-") as name:
        yield Path(name)


class Torment:
    """Runs that are killed and resumed in one place, and what is known of them."""

    def __init__(self, place: Path, source: "Processes | Nursery", kind: str, workers: str) -> None:
        self._source = source
        self._folder = place / "killed"
        self._progress = place / "progress.json"
        spec = place / "small.toml"
        spec.write_text(SPECS[kind])
        self._begin = ("run", str(spec), f"workers={{{workers}}}", "--out")
        state = {"kills": 0, "runs": 0, "kinds": {}}
        if self._progress.exists():
            state = json.loads(self._progress.read_text())
        self.kills, self.runs = state["kills"], state["runs"]
        self.kinds = Counter(state["kinds"])
        self.wanted = self._undisturbed(place / "undisturbed")

    def live(self, *, may_die: bool) -> None:
        """Begin the run or go on with it, until it is killed or through."""
        draws = random.Random(f"{self.kills} {self.runs}")
        kind = draws.choice(KINDS)
        watch = Watch(self._folder, kind, draws.randint(1, 25))
        life = self._start(self._folder)
        if may_die and killed(life, watch):
            self.kills += 1
            self.kinds[kind] += 1
        else:
            _end_well(life)
            found = outcome(self._folder)
            if found != self.wanted:
                raise SystemExit(f"after {self.kills} kills: {found[0]}, not {self.wanted[0]}")
            self.runs += 1
            shutil.rmtree(self._folder)
        state = {"kills": self.kills, "runs": self.runs, "kinds": self.kinds}
        self._progress.write_text(json.dumps(state))

    def is_through(self) -> bool:
        """Tell whether no run is under way."""
        return not self._folder.exists()

    def control(self) -> None:
        """Kill a run once and restore less than all: it must not come to the same result."""
        if not killed(self._start(self._folder), Watch(self._folder, "saved", 0)):
            raise SystemExit("the control was not killed")
        spoil(self._folder)
        _end_well(self._start(self._folder))
        if outcome(self._folder)[0] == self.wanted[0]:
            raise SystemExit("the control is the same, though its weights were not restored")
        shutil.rmtree(self._folder)

    def _undisturbed(self, folder: Path) -> tuple[str, bytes]:
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _end_well(self._start(folder))
            (folder / "done").touch()
        return outcome(folder)

    def _start(self, folder: Path) -> Life:
        is_begun = (folder / "config.json").exists()
        return self._source.start(*(("run", "--resume") if is_begun else self._begin), str(folder))


def _end_well(life: Life) -> None:
    if code := life.wait():
        raise SystemExit(f"a life ended with exit code {code} by itself")


def torment(place: Path, asked: argparse.Namespace) -> int:
    """Kill and resume until there were enough kills; return the exit code."""
    end = time.monotonic() + asked.seconds
    source: Processes | Nursery = Nursery() if asked.fork else Processes()
    try:
        runs = Torment(place, source, asked.runs, WORKERS[asked.workers])
        while runs.kills < asked.kills or not runs.is_through():
            if time.monotonic() > end:
                sys.stdout.write(f"{runs.kills} kills so far: call again with this folder\n")
                return 75  # EX_TEMPFAIL
            runs.live(may_die=runs.kills < asked.kills)
        runs.control()
    finally:
        source.close()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(runs.kinds.items()))
    sys.stdout.write(
        f"{runs.kills} kills ({kinds}) in {runs.runs} runs: one SHA-256, {runs.wanted[0]}, and "
        "the same records; another where state is not restored\n"
    )
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--runs", choices=sorted(SPECS), default="federated")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and go on from them")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after about this time")
    parser.add_argument("--workers", choices=sorted(WORKERS), default="inline")
    parser.add_argument("--fork", action="store_true", help="import once, fork each life")
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.nursery:
        nursery()
        return 0
    with workplace(asked.folder) as place:
        return torment(place, asked)


if __name__ == "__main__":
    sys.exit(main())
