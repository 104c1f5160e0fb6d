"""The command line: load commands on demand, turn errors into one line and an exit code.

Exit codes: 0 done; 1 failed run or a bug in pliant; 2 wrong input or usage; 3 a network that
`pliant inspect` refuses; 130 interrupted.
"""

import errno
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError
from cyclopts.config import Toml

from pliant import __version__
from pliant.extras import MissingExtra
from pliant.suggestions import did_you_mean
from pliant.user_errors import describe_user_error

# Name, location and purpose of each command. A module is imported only when its command is called,
# so that `pliant --help` does not import torch. An `app` must have the name given here.
COMMANDS = (
    ("demo", "pliant.cli.demo.command:demo", "Run pliant on the bundled digits."),
    ("run", "pliant.cli.run:run", "Run or resume an experiment."),
    ("compare", "pliant.cli.compare:compare", "Run a matrix of experiments and print a table."),
    ("report", "pliant.cli.report:report", "Write an HTML report on runs."),
    ("model", "pliant.cli.model:app", "Export the network of a run, or describe such a file."),
    ("dash", "pliant.cli.dash:dash", "Follow runs in the browser."),
    ("search", "pliant.cli.search:search", "Find rate vectors that cost little and train well."),
    ("server", "pliant.cli.server:app", "Run an experiment on real devices."),
    ("device", "pliant.cli.device:app", "Join a server as a device."),
    ("deploy", "pliant.cli.deploy:app", "Make keys, or run a federation on this machine."),
    ("data", "pliant.cli.data:app", "List, download and check data sets."),
    ("inspect", "pliant.cli.inspect:inspect", "Show which filters of a network can be dropped."),
    ("bench", "pliant.cli.bench:app", "Measure pliant on this machine."),
    ("completion", "pliant.cli.completion:completion", "Print a shell completion script."),
)

DONE, FAILED, WRONG_INPUT, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130

HELP = """\
Train one neural network across many unequal devices, bending to what each can spend now.

Example: pliant demo"""
EPILOGUE = """\
Add --debug anywhere to see the traceback of an error, and --config FILE to read options from a
TOML file with one table per command, like [server] and [device].
Exit codes: 0 done, 1 failed, 2 wrong input or usage, 3 network refused, 130 interrupted."""

# These errors are about a path that the user gave; any other OSError (a full disk) is a failed run.
_PATH_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


_PATH_PROBLEMS = {
    errno.ENOENT: "expected a file or folder, found none",
    errno.EISDIR: "expected a file, found a folder",
    errno.ENOTDIR: "expected folders along this path, found a file",
    errno.EEXIST: "expected nothing there yet, found a file or folder",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ELOOP: "expected a file or folder, found symbolic links in a circle",
    errno.ENAMETOOLONG: "expected a shorter name",
}
_PATH_ERRNOS = (errno.ELOOP, errno.ENAMETOOLONG)  # Python has no class for these


def parse_integer(kind: Any, tokens: Sequence[Any]) -> int:
    """Return the integer that an option was given; cyclopts alone would round 1.5."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError from None  # without a text, cyclopts writes its own


INTEGER = Parameter(converter=parse_integer)  # of every option that is an integer


_LONG_WORD = re.compile(r"([^\s/]{60})[^\s/]{60,}([^\s/]{20})")  # of a wrong name, say
_ALLOCATION = re.compile(r"tried to allocate (\d+) bytes")  # torch says no more than that


class NetworkRefused(Exception):
    """A network that cannot be made elastic."""


def build_app(command: str | None, *, is_plain: bool) -> App:
    """Return the application without loading its commands."""
    app = App(
        name="pliant",
        help=HELP,
        help_epilogue=EPILOGUE,
        help_format="plaintext",
        help_formatter="plain" if is_plain else "default",
        version=f"pliant {__version__}",
        version_format="plaintext",
        suppress_keyboard_interrupt=False,
        result_action="return_int_as_exit_code_else_zero",
    )
    for name, where, purpose in COMMANDS:
        # only the chosen command shows the help of its own module
        app.command(where, name=name, help=None if name == command else purpose)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process without threads can be forked
    words = list(sys.argv[1:] if arguments is None else arguments)
    tokens = [token for token in words if token != "--debug"]
    try:
        _refuse_empty_values(tokens)
        tokens, config = _take_config(tokens)
        app = build_app(next(iter(tokens), None), is_plain=not sys.stdout.isatty())
        if config is not None:
            app.config = (Toml(config, must_exist=True),)
        code = int(app(tokens, exit_on_error=False, print_error=False) or DONE)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except BaseException as error:  # the user's code may raise SystemExit or one of its own
        is_known = isinstance(error, Exception | KeyboardInterrupt)
        if not is_known and describe_user_error(error) is None:
            raise
        if "--debug" in words:
            traceback.print_exc()
        code, line = describe_error(error)
        line = _LONG_WORD.sub(r"\1...\2", line)
        sys.stderr.write(f"pliant: {line}\n")
        return code


def _take_config(tokens: list[str]) -> tuple[list[str], str | None]:
    """Return the tokens without `--config FILE`, and the file."""
    if "--config" not in tokens:
        return tokens, None
    index = tokens.index("--config")
    if index + 1 == len(tokens):
        raise ValueError("--config: expected a TOML file, found nothing after it")
    path = tokens[index + 1]
    try:
        with open(path, "rb") as file:
            tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return tokens[:index] + tokens[index + 2 :], path


def _refuse_empty_values(tokens: Sequence[str]) -> None:
    """Raise if an option's value is empty: as a path, it would be the current folder."""
    for option, value in pairwise([*tokens, "-"]):
        if option.startswith("--") and (option.endswith("=") or value == ""):
            raise ValueError(f"{option.rstrip('=')}: expected a value, got an empty one")


def describe_error(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the one-line message for an error."""
    if isinstance(error.__cause__, MissingExtra):  # cyclopts wraps errors of loading
        error = error.__cause__
    if isinstance(error, UnknownCommandError):
        return WRONG_INPUT, _describe_unknown_command(error)
    text = " ".join(str(error).split())
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED, f"interrupted; {text}" if text else "interrupted"
        case CycloptsError():
            return WRONG_INPUT, f"{text} (see `pliant --help`)"
        case MissingExtra():
            return WRONG_INPUT, text
        case NetworkRefused():
            return REFUSED, text
        case _ if (line := describe_user_error(error)) is not None:
            return WRONG_INPUT, line
        case MemoryError() | RuntimeError() if (size := _find_allocation(error)) is not None:
            return FAILED, f"not enough memory{size}: use smaller networks, batches or fleets"
        case OSError():
            is_path = isinstance(error, _PATH_ERRORS) or error.errno in _PATH_ERRNOS
            return (WRONG_INPUT if is_path else FAILED), _describe_os_error(error) or text
        # A bare KeyError or IndexError is a bug of ours: errors of the user have a message.
        case ValueError() | LookupError() if text and type(error) not in (KeyError, IndexError):
            return WRONG_INPUT, text
        case _:
            name = type(error).__name__
            return FAILED, f"internal error, {name}: {text} (--debug shows where)"


def _find_allocation(error: BaseException) -> str | None:
    """Return how much memory was missing, or "" if unknown; None for other errors."""
    found = _ALLOCATION.search(str(error))
    if found is not None:
        return f" for {int(found[1]) / 1e9:,.1f} GB"
    return "" if isinstance(error, MemoryError) else None


def _describe_os_error(error: OSError) -> str | None:
    """Return what is wrong with which path, or None for an error with a message of its own."""
    problem = _PATH_PROBLEMS.get(error.errno or 0)
    if problem is None or error.filename is None:
        return problem
    return f"{error.filename}: {problem}"


def _describe_unknown_command(error: UnknownCommandError) -> str:
    # The message of cyclopts would import every command, and torch, to look for synonyms.
    known = [command for command in error.app or () if not command.startswith("-")]
    name = error.unused_tokens[0] if error.unused_tokens else ""
    return f"unknown command {name!r}{did_you_mean(name, known)} (see `pliant --help`)"
