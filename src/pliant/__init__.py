"""Train one neural network across many unequal devices, bending to what each can spend now."""

import ast
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

__version__ = version("pliant")


@cache
def _read_exports() -> dict[str, str]:
    """Map each public name to its module, as `__init__.pyi` lists them.

    Modules are imported on first use, so that `import pliant` and the command line start without
    torch.
    """
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> object:
    module = _read_exports().get(name)
    if module is None:
        raise AttributeError(f"module 'pliant' has no attribute {name!r}")
    if module in ("pliant", "pliant.nn", "pliant.analysis"):  # a module: `data`, `models`, `plot`
        return import_module(f"{module}.{name}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_read_exports()})
