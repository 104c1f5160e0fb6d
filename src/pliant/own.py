"""Functions of a user's own, named in a file of plain data as `file.py:function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_own(name: str) -> bool:
    """Tell whether a name is that of a user's own function."""
    return ":" in name


def anchored(name: str, folder: Path) -> str:
    """Return the name with the whole path of its file, which counts from a folder."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    return f"{(folder / place).resolve()}:{function}"


def own_function(name: str) -> Callable[..., Any]:
    """Find a function by `file.py:function` or `package.module:function`."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ValueError(f"Expected file.py:function or package.module:function, got {name!r}")
    module = _from_file(Path(place)) if place.endswith(".py") else _installed(place)
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{place}: expected a function {attribute!r}, found none")
    return function


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"Expected an installed module {name!r}, found none") from None
        raise


def _from_file(path: Path) -> Any:
    """Import a file once; it may import its neighbours, as a script may."""
    name = f"pliant_own_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a Python file, found none")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as dataclasses and pickle want it
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module
