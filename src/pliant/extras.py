"""Import optional libraries, or say which extra installs them."""

from importlib import import_module
from types import ModuleType


class MissingExtra(ImportError):
    """An optional library is not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise an error that names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise MissingExtra(
            f"{library} is not installed: run `pip install 'pliant[{extra}]'`"
        ) from None
