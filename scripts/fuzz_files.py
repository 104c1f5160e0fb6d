"""Give thousands of files near the schema to `pliant`: each is run, or refused in one clear line.

    python scripts/fuzz_files.py --examples 3000

Every file gets a process of its own with limits on memory and time. A run that is still training
when its time is over counts as run; a refused file must leave nothing behind. Prints one example of
each kind of problem, and returns 1 if there is any.
"""

import argparse
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.cli.any_file import BASE, format_file, make_damaged_texts, make_documents  # noqa: E402

from pliant.cli import main as run_command  # noqa: E402

SECONDS = 20.0  # per file
MEMORY = 6 * 10**9  # bytes of address space
MAX_LINE = 400  # characters


def make_files() -> st.SearchStrategy[tuple[str, str]]:
    """Return a strategy for a command and the text of its file."""
    drawn = [
        make_documents(command, is_wild=is_wild).map(lambda d, c=command: (c, format_file(d)))
        for command in ("run", "run", "compare", "search")
        for is_wild in (False, True)
    ]
    damaged = make_damaged_texts(format_file(BASE)).map(lambda text: ("run", text))
    return st.one_of(*drawn, damaged)


def run_file(command: str, text: str, folder: Path) -> int | None:
    """Run a command in a child process; return its exit code, or None if its time was over."""
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
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def find_problem(code: int | None, folder: Path) -> str | None:
    """Return what is wrong with how a command ended, if anything."""
    line = (folder.parent / "err.txt").read_text(errors="replace")
    names = sorted(path.name for path in folder.iterdir())
    if code is None:
        has_begun = any(path.stat().st_size for path in folder.rglob("*.jsonl"))
        return None if has_begun else "it hangs before the first round"
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
        endings["over time" if code is None else f"exit code {code}"] += 1
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
