"""Where data files are: an explicit folder, or `PLIANT_DATA`, or the user's cache."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def data_root(root: Path | None = None, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which data sets are looked for."""
    if root is not None:
        return Path(root).expanduser()
    if named := environment.get("PLIANT_DATA"):
        return Path(named).expanduser()
    return _cache(environment) / "pliant"


def _cache(environment: Mapping[str, str]) -> Path:
    if named := environment.get("XDG_CACHE_HOME"):
        return Path(named)
    if sys.platform == "win32" and (local := environment.get("LOCALAPPDATA")):
        return Path(local)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def find_file(root: Path, folder: str, name: str) -> Path | None:
    """Return a data file from the publisher's folder or the root itself, plain or gzipped."""
    for place in (root / folder, root):
        for spelling in (name, f"{name}.gz"):
            if (place / spelling).is_file():
                return place / spelling
    return None


def locate(root: Path, folder: str, name: str, source: str) -> Path:
    """Return where a data file is, or say where it is expected and how to get it."""
    found = find_file(root, folder, name)
    if found is None:
        raise FileNotFoundError(
            f"{root / folder / name}: expected this file (or with .gz): "
            f"run `pliant data get {source}` or name another folder by PLIANT_DATA"
        )
    return found
