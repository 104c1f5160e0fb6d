"""Devices' public keys as Flower knows them: those of the keys' folder, and no others."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
from msgspec import Struct

from pliant import atomic

REGISTRARS = 4  # Flower takes one key a call, and a call is a process

Flwr = Callable[..., "CompletedProcess[str]"]  # run Flower's command with these arguments


class Entry(Struct, frozen=True):
    """A key that Flower was told of."""

    node: str
    device: str


def register(keys: Path, known: Path, superlink: str, flwr: Flwr) -> None:
    """Let Flower know every device's key by the device's number, and forget keys that have gone.

    Flower keeps keys beyond a restart, so what it was told is kept beside it.
    """
    entries = _read(known)
    folders = sorted(path for path in (keys / "devices").iterdir() if path.is_dir())
    wanted = {(folder / "key.pub").read_text().strip(): folder for folder in folders}
    gone = [
        key
        for key, entry in entries.items()
        if key not in wanted or wanted[key].name != entry.device
    ]
    for key in gone:
        done = flwr("supernode", "unregister", entries[key].node, superlink)
        if done.returncode and "not found" not in said(done):
            raise ChildProcessError(
                f"the old key of device {entries[key].device} still counts: {said(done)}"
            )
        del entries[key]

    def told(key: str) -> Entry | None:
        public, name = str(wanted[key] / "key.pub"), wanted[key].name
        done = flwr("supernode", "register", public, superlink, "--name", name)
        found = re.search(r"SuperNode (\d+) registered", done.stdout)
        if done.returncode == 0 and found is not None:
            return Entry(found.group(1), name)
        if re.search("already|in use", done.stdout + done.stderr):
            return None  # it was told before there was this list
        raise ChildProcessError(f"device {name} was not registered: {said(done)}")

    fresh = [key for key in wanted if key not in entries]
    with ThreadPoolExecutor(REGISTRARS) as pool:
        found = dict(zip(fresh, pool.map(told, fresh), strict=True))
    entries |= {key: entry for key, entry in found.items() if entry is not None}
    atomic.write_bytes(known, msgspec.json.encode(entries))


def _read(known: Path) -> dict[str, Entry]:
    try:
        return msgspec.json.decode(known.read_bytes(), type=dict[str, Entry])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def said(done: "CompletedProcess[str]") -> str:
    """Return what a command said at its end, in one line."""
    return " ".join((done.stdout + done.stderr).split())[-500:]
