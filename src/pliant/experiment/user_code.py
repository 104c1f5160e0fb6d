"""Load user code named as `file.py:name` or `package.module:name`."""

import copyreg
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

from pliant.methods.base import Update
from pliant.user_errors import add_user_folder
from pliant.value import decode, encode


def is_user_function(name: str) -> bool:
    """Return whether a name refers to a user's function."""
    return ":" in name


def make_absolute(name: str, folder: Path) -> str:
    """Return the name with an absolute path; relative paths start at `folder`."""
    source, _, function = name.rpartition(":")
    if not source.endswith(".py"):
        return name
    path = (folder / source).resolve()
    add_user_folder(path.parent)  # a worker may be the only one to load it
    return f"{path}:{function}"


def load_function(name: str) -> Callable[..., Any]:
    """Import a function by `file.py:function` or `package.module:function`."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise ValueError(f"Expected file.py:function or package.module:function, got {name!r}")
    module = _import_file(Path(source)) if source.endswith(".py") else _import_installed(source)
    if file := getattr(module, "__file__", None):
        add_user_folder(Path(file).parent)
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{source}: expected a function {attribute!r}, found none")
    return function


def load_method(code: str, options: dict[str, Any]) -> Any:
    """Make a method from a user's class and its fields; worker processes load it the same way."""
    method_class: Any = load_function(code)
    if not isinstance(method_class, type) or not hasattr(method_class, "local"):
        raise ValueError(f"{code}: expected a method class with a field `local`, got another")
    for name, find_problem in (("train", _find_train_problem), ("merge", _find_merge_problem)):
        function = vars(method_class).get(name)
        if function is not None and not hasattr(function, "__wrapped__"):
            setattr(method_class, name, _check_results(function, find_problem))
    copyreg.pickle(method_class, lambda method: (load_method, (code, encode(method))))
    try:
        return decode(options, method_class)
    except ValueError as error:
        raise ValueError(f"{code}: {error}") from None


def _check_results(
    function: Callable[..., Any], find_problem: Callable[[Any, Any], str | None]
) -> Callable[..., Any]:
    """Return a user's function that raises if its result is wrong, with the line of the function.

    The error would show in pliant's own code otherwise.
    """

    @wraps(function)
    def checked(self: Any, net: Any, given: Any, others: Any) -> Any:
        result = function(self, net, given, others)
        if problem := find_problem(given, result):
            code, name = function.__code__, function.__qualname__
            place = f"{code.co_filename}:{code.co_firstlineno}"
            raise ValueError(f"{place}: expected {name} to return {problem}")
        return result

    return checked


def _find_train_problem(task: Any, update: Any) -> str | None:
    return None if isinstance(update, Update) else f"a pl.Update, got {type(update).__name__}"


def _find_merge_problem(state: Any, merged: Any) -> str | None:
    params = getattr(merged, "params", None)
    if not isinstance(params, dict):
        return f"a state like pl.ServerState, got {type(merged).__name__}"
    missing = sorted(state.params.keys() - params.keys())
    return f"all parameters of the network, found none named {missing[0]}" if missing else None


def hash_code(code: str) -> str | None:
    """Return the SHA-256 of a user's file; None for an installed module."""
    source = code.rpartition(":")[0]
    return sha256(Path(source).read_bytes()).hexdigest() if source.endswith(".py") else None


def _import_installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"Expected an installed module {name!r}, found none") from None
        raise


def _import_file(path: Path) -> Any:
    """Import a file once; like a script, it may import files in its folder."""
    path = path.resolve()
    # files in different folders may have the same name
    name = f"pliant_own_{path.stem}_{sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a Python file, found none")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    add_user_folder(path.parent)  # first, as the import itself may fail
    sys.modules[name] = module  # dataclasses and pickle look it up while it runs
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module
