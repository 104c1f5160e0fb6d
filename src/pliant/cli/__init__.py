"""The command line: commands are loaded when called, errors become one line and an exit code.

Exit codes: 0 done; 1 failed run or a fault of pliant; 2 wrong input or usage; 130 interrupted.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownCommandError

from pliant import __version__
from pliant.extras import MissingExtra
from pliant.hints import nearest

# One line a command: its name, where it lives, what it does. A module is imported only when its
# command is called, so that `pliant --help` needs no torch. An `app` must have the name given here.
COMMANDS = (
    ("demo", "pliant.cli.demo:demo", "Run pliant on the digits that travel with it."),
    ("run", "pliant.cli.run:run", "Run an experiment, or go on with one."),
    ("compare", "pliant.cli.compare:compare", "Run a matrix of experiments and print a table."),
    ("report", "pliant.cli.report:report", "Write an HTML report about runs."),
    ("dash", "pliant.cli.dash:dash", "Show runs in the browser while they go on."),
    ("search", "pliant.cli.search:search", "Find rate vectors that cost little and learn much."),
    ("server", "pliant.cli.server:server", "Run an experiment on real devices."),
    ("device", "pliant.cli.device:device", "Be a device of a server's federation."),
    ("deploy", "pliant.cli.deploy:app", "Make keys, and try a federation on this machine."),
    ("data", "pliant.cli.data:app", "List, get and check data sets."),
    ("inspect", "pliant.cli.inspect:inspect", "Show which filters of a network can be dropped."),
    ("bench", "pliant.cli.bench:app", "Measure pliant on this machine."),
    ("completion", "pliant.cli.completion:completion", "Print what completes these in a shell."),
)

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

HELP = """\
Train one neural network across many unequal devices, bending to what each can spend now.

Example: pliant demo"""
EPILOGUE = """\
--debug anywhere shows the traceback of an error.
Exit codes: 0 done, 1 failed, 2 wrong input or usage, 130 interrupted."""

# What these say is about a path that was given; any other OSError (a full disk) is a failed run.
_WRONG_PATH = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def build(chosen: str | None, *, is_plain: bool) -> App:
    """Return the application, its commands not yet loaded."""
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
        # the purpose stands in for a module's own help, which only the chosen command shows
        app.command(where, name=name, help=None if name == chosen else purpose)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    tokens = [token for token in given if token != "--debug"]
    app = build(next(iter(tokens), None), is_plain=not sys.stdout.isatty())
    try:
        code = int(app(tokens, exit_on_error=False, print_error=False) or DONE)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if len(tokens) < len(given):
            traceback.print_exc()
        code, line = explain(error)
        sys.stderr.write(f"pliant: {line}\n")
        return code


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the one line that stand for an error."""
    if isinstance(error.__cause__, MissingExtra):  # wrapped where a command is loaded
        error = error.__cause__
    if isinstance(error, UnknownCommandError):
        return WRONG_INPUT, _unknown(error)
    text = " ".join(str(error).split())
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED, f"interrupted; {text}" if text else "interrupted"
        case CycloptsError():
            return WRONG_INPUT, f"{text} (see `pliant --help`)"
        case MissingExtra():
            return WRONG_INPUT, text
        case OSError():
            return (WRONG_INPUT if isinstance(error, _WRONG_PATH) else FAILED), text
        # Bare lookups that miss are slips of ours: what a user gets wrong is told by a sentence.
        case ValueError() | LookupError() if text and type(error) not in (KeyError, IndexError):
            return WRONG_INPUT, text
        case _:
            name = type(error).__name__
            return FAILED, f"internal error, {name}: {text} (--debug shows where)"


def _unknown(error: UnknownCommandError) -> str:
    # cyclopts' own text would load every command, torch with it, to look for synonyms
    known = [name for name in error.app or () if not name.startswith("-")]
    got = error.unused_tokens[0] if error.unused_tokens else ""
    return f"unknown command {got!r}{nearest(got, known)} (see `pliant --help`)"
