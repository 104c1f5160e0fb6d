"""Errors that come from the user's own files: name the file and the line."""

import re
import traceback
from pathlib import Path

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OWN_FOLDER = Path(__file__).resolve().parent  # a module of pliant may be named as well
_user_folders: set[Path] = set()


def add_user_folder(folder: Path) -> None:
    """Take errors in a folder's files for the user's, also if another process runs them."""
    if not folder.is_relative_to(_OWN_FOLDER):
        _user_folders.add(folder)


def describe_user_error(error: BaseException) -> str | None:
    """Return `file:line: error` if an error came from a user's file, here or in a worker."""
    frames = _FRAME.findall("".join(traceback.format_exception(error)))
    places = [f"{file}:{line}" for file, line in frames if Path(file).parent in _user_folders]
    if not places:
        return None
    text = " ".join(str(error).split())
    return ": ".join(filter(None, (places[-1], type(error).__name__, text)))
