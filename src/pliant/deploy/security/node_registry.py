"""Keep Flower's list of device keys the same as the keys folder."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
from msgspec import Struct

from pliant.storage import atomic

MAX_PARALLEL_CALLS = 4  # Flower takes one key per call, and each call is a process

FlwrRunner = Callable[..., "CompletedProcess[str]"]  # runs `flwr` with these arguments


class NodeEntry(Struct, frozen=True):
    """A key that is registered with Flower."""

    node: str
    device: str


def register_devices(keys: Path, registry_path: Path, superlink: str, run_flwr: FlwrRunner) -> None:
    """Register every device's key under its number and unregister keys that are gone.

    Flower keeps keys after a restart, so the registered ones are listed in `registry_path`.
    """
    entries: dict[str, NodeEntry] = {}
    with suppress(FileNotFoundError, msgspec.DecodeError):
        entries = msgspec.json.decode(registry_path.read_bytes(), type=dict[str, NodeEntry])
    folders = sorted(path for path in (keys / "devices").iterdir() if path.is_dir())
    devices = {(folder / "key.pub").read_text().strip(): folder.name for folder in folders}
    for key in [key for key, entry in entries.items() if devices.get(key) != entry.device]:
        entry = entries.pop(key)
        completed = run_flwr("supernode", "unregister", entry.node, superlink)
        output = summarise_output(completed)
        if completed.returncode and "not found" not in output:
            raise ChildProcessError(
                f"the old key of device {entry.device} was not unregistered: {output}"
            )

    def register_key(key: str) -> NodeEntry | None:
        name, path = devices[key], keys / "devices" / devices[key] / "key.pub"
        completed = run_flwr("supernode", "register", str(path), superlink, "--name", name)
        match = re.search(r"SuperNode (\d+) registered", completed.stdout)
        if completed.returncode == 0 and match is not None:
            return NodeEntry(match.group(1), name)
        if re.search("already|in use", completed.stdout + completed.stderr):
            return None  # registered before the list was written
        raise ChildProcessError(f"device {name} was not registered: {summarise_output(completed)}")

    new_keys = [key for key in devices if key not in entries]
    with ThreadPoolExecutor(MAX_PARALLEL_CALLS) as pool:
        new_entries = list(pool.map(register_key, new_keys))
    entries |= {key: entry for key, entry in zip(new_keys, new_entries, strict=True) if entry}
    atomic.write_bytes(registry_path, msgspec.json.encode(entries))


def summarise_output(completed: "CompletedProcess[str]") -> str:
    """Return the end of a command's output in one line."""
    return " ".join((completed.stdout + completed.stderr).split())[-500:]
