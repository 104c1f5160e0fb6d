"""Import optional libraries, or say which extra installs them."""

from importlib import import_module
from types import ModuleType


class MissingExtra(ImportError):
    """An optional library is not installed, or cannot be imported."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise an error that names the extra to install."""
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except Exception as error:  # libraries fail in many ways where another version is installed
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and missing.partition(".")[0] == library:
            problem, command = "is not installed", "pip install"
        else:
            problem = f"is installed but fails to import ({type(error).__name__}: {error})"
            command = "pip install --force-reinstall"
        raise MissingExtra(f"{library} {problem}: run `{command} 'pliant[{extra}]'`") from error
