"""Give thousands of files near the schema to `pliant`: each is run, or refused in one clear line.

    python scripts/fuzz_files.py --examples 3000

Every file gets a process of its own with limits on memory and time, forked from one that has
imported everything. A run that is still training a moment after its first record counts as run; a
refused file must leave nothing behind. Prints one example of each kind of problem, and returns 1 if
there is any.
"""

import argparse
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.cli.any_file import (  # noqa: E402
    BASE,
    SMALL_SEARCH,
    format_file,
    make_damaged_texts,
    make_documents,
)

from pliant.cli import main as run_command  # noqa: E402

SECONDS = 20.0  # per file
SECONDS_OF_TRAINING = 3.0  # after the first record: a run may be as long as its file asks
MEMORY = 6 * 10**9  # bytes of address space
MAX_LINE = 400  # characters


def make_files() -> st.SearchStrategy[tuple[str, str]]:
    """Return a strategy for a command and the text of its file."""
    drawn = [
        make_documents(command, style).map(lambda d, c=command: (c, format_file(d)))
        for command in ("run", "run", "compare", "search")
        for style in ("near", "wild", "fitting")
    ]
    damaged = make_damaged_texts(format_file(BASE)).map(lambda text: ("run", text))
    return st.one_of(*drawn, damaged)


def run_file(command: str, text: str, folder: Path, modules: Path | None = None) -> int | None:
    """Run a command in a child process; return its exit code, or None if its time was over.

    The names of the modules that it imported are written to `modules`, without a limit of time.
    """
    (folder / "file.toml").write_text(text, encoding="utf-8", newline="")
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(folder)
        for descriptor, name in ((1, "../out.txt"), (2, "../err.txt")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        code = 99
        try:
            code = run_command([command, "file.toml"])
            if modules is not None:
                modules.write_text(
                    "\n".join(name for name in sys.modules if "__main__" not in name)
                )
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end, is_training = time.monotonic() + SECONDS, False
    while modules is not None or time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if not is_training and has_records(folder):
            is_training, end = True, time.monotonic() + SECONDS_OF_TRAINING
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def has_records(folder: Path) -> bool:
    """Return whether a run in this folder has written a record."""
    try:
        return any(path.stat().st_size for path in folder.glob("runs/**/*.jsonl"))
    except FileNotFoundError:  # the child has just removed it
        return False


def import_everything() -> None:
    """Import what the commands import, so that no child process spends its time on that.

    They run in a child process themselves: after training here, children could not train.
    """
    keys = {"run": {}, "compare": {"matrix": {"seed": [0]}}, "search": {"search": SMALL_SEARCH}}
    for command, more in keys.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "folder")
            folder.mkdir()
            names = Path(temporary, "modules.txt")
            if run_file(command, format_file(BASE | more), folder, names) != 0:
                raise SystemExit(f"pliant {command} does not run the simplest file")
            for name in names.read_text().split():
                with suppress(ImportError):
                    importlib.import_module(name)


def find_problem(code: int | None, folder: Path) -> str | None:
    """Return what is wrong with how a command ended, if anything."""
    line = (folder.parent / "err.txt").read_text(errors="replace")
    names = sorted(path.name for path in folder.iterdir())
    if code is None:
        return None if has_records(folder) else "it hangs before the first round"
    if code == 0:
        return None if "runs" in names else "done, but without a folder"
    problems = (
        (code not in (1, 2), f"exit code {code}"),
        (line.count("\n") != 1 or not line.startswith("pliant: "), "not one line"),
        ("internal error" in line, "internal error"),
        (code == 1, "a failed run"),
        (len(line) > MAX_LINE, "a long line"),
        (names != ["file.toml"], "files are left"),
    )
    found = [problem for is_found, problem in problems if is_found]
    return f"{', '.join(found)}: {line.strip()[-600:]}" if found else None


def main() -> int:
    """Run the files and print the problems."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    import_everything()
    endings: Counter[str] = Counter()
    problems: dict[str, tuple[str, str, str]] = {}  # one of each kind

    @seed(options.seed)
    @settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(make_files())
    def check(file: tuple[str, str]) -> None:
        command, text = file
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "folder")
            folder.mkdir()
            code = run_file(command, text, folder)
            problem = find_problem(code, folder)
        endings["still training" if code is None else f"exit code {code}"] += 1
        if sum(endings.values()) % 100 == 0:
            sys.stderr.write(f"{sum(endings.values())} files\n")
        if problem:
            kind = re.sub(r"[\d.]+|'[^']*'|`[^`]*`", "_", problem)[:120]
            if kind not in problems:
                sys.stdout.write(f"--- {command}: {problem}\n{text}\n")
                sys.stdout.flush()
            problems.setdefault(kind, (command, text, problem))

    check()
    counts = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    sys.stdout.write(
        f"{sum(endings.values())} files: {counts}; {len(problems)} kinds of problems\n"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
