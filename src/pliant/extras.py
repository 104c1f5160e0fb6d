"""Optional parts: import a library that an extra brings, or say in one line how to get it."""

from importlib import import_module
from types import ModuleType


class MissingExtra(ImportError):
    """An optional library is asked for and not installed."""


def need(module: str, extra: str) -> ModuleType:
    """Import `module`, or tell which extra of pliant brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise MissingExtra(
            f"{library} is not installed: run `pip install 'pliant[{extra}]'`"
        ) from None
