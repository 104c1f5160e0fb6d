"""Write the lock files from what this environment holds, with every hash on PyPI.

Run it as `make lock` after trying new versions in `.venv` with pip. torch is left out: it has a
file of its own, because its builds differ from index to index. The tool that builds the site of
the documentation lives in an environment of its own, so pip says what it needs.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.request import urlopen

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

HERE = Path(__file__).resolve().parent
RUNTIME_EXTRAS = ("search", "report", "dashboard", "images")
LINK = re.compile(r'/([^/"]+)#sha256=([0-9a-f]{64})"')
BUILD = ("hatchling", "editables")
DOCS = "zensical==0.0.73"


def closure(wanted: Iterable[str]) -> set[str]:
    """Return the names of these requirements and of all that they require in turn."""
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in wanted]
    while waiting:
        requirement, parent_extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": parent_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                needs = distribution(name).requires or []
            except PackageNotFoundError:
                raise SystemExit(f"{name} is not installed: nothing to lock") from None
            waiting += [(Requirement(text), extra) for text in needs]
    return {name for name, _ in seen}


def resolved(wanted: str) -> dict[str, str]:
    """Return what pip would install for a requirement into an empty environment, by versions."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--report", "-", wanted]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    items = [item["metadata"] for item in json.loads(found)["install"]]
    return {canonicalize_name(item["name"]): item["version"] for item in items}


def pin(name: str, version: str) -> str:
    """Return the lock's entry for a distribution: its version and the hashes of all its files."""
    with urlopen(f"https://pypi.org/simple/{name}/", timeout=60) as answer:
        links = LINK.findall(answer.read().decode())
    hashes = sorted(f"--hash=sha256:{found}" for file, found in links if is_of(file, version))
    if not hashes:
        raise SystemExit(f"{name} {version}: no file of it on the index")
    return " \\\n    ".join([f"{name}=={version}", *hashes])


def is_of(file: str, version: str) -> bool:
    """Tell whether a wheel or source archive is of this version."""
    try:
        parse = parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename
        return str(parse(file)[1]) == version
    except (InvalidWheelFilename, InvalidSdistFilename):
        return False  # an installer of long ago


def held(names: Iterable[str]) -> dict[str, str]:
    """Return the versions that this environment holds."""
    return {name: distribution(name).version for name in names}


def write(path: Path, versions: Mapping[str, str]) -> None:
    """Write one lock file."""
    with ThreadPoolExecutor(8) as pool:
        pins = list(pool.map(pin, sorted(versions), map(versions.__getitem__, sorted(versions))))
    path.write_text("# Complete and exact: made by `make lock`, installed with --no-deps.\n")
    with path.open("a") as file:
        file.writelines(f"{entry}\n" for entry in pins)


def main() -> None:
    """Lock what `make demo` runs on, what tests and checks need on top of it, and `make docs`."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    runtime = [*project["project"]["dependencies"], *BUILD]
    runtime += [text for extra in RUNTIME_EXTRAS for text in extras[extra]]
    everything = [text for group in project["dependency-groups"].values() for text in group]
    everything += [text for group in extras.values() for text in group]
    first = closure(runtime) - {"torch"}
    write(HERE / "lock.txt", held(first))
    write(HERE / "lock-dev.txt", held(closure(everything) - first - {"torch"}))
    write(HERE / "lock-docs.txt", resolved(DOCS))


if __name__ == "__main__":
    main()
