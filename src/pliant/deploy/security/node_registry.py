"""Keep Flower's list of device keys the same as the keys folder."""

from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from pliant.storage import atomic


class NodeControl(Protocol):
    """Change Flower's list."""

    def register_device(self, public_key: Path, name: str) -> int | None:
        """Register a key and return its node; None if it is registered already."""

    def unregister_device(self, node: int) -> None:
        """Unregister a node, which may be gone."""


class NodeEntry(Struct, frozen=True):
    """A key that is registered with Flower."""

    node: int
    device: str


def register_devices(keys: Path, registry_path: Path, control: NodeControl) -> None:
    """Register every device's key under its number and unregister keys that are gone.

    Flower keeps keys after a restart, so the registered ones are listed in `registry_path`.
    """
    entries: dict[str, NodeEntry] = {}
    with suppress(FileNotFoundError, msgspec.DecodeError):
        entries = msgspec.json.decode(registry_path.read_bytes(), type=dict[str, NodeEntry])
    folders = sorted(path for path in (keys / "devices").iterdir() if path.is_dir())
    devices = {(folder / "key.pub").read_text().strip(): folder.name for folder in folders}
    for key in [key for key, entry in entries.items() if devices.get(key) != entry.device]:
        control.unregister_device(entries.pop(key).node)
    for key, name in devices.items():
        if key not in entries:
            node = control.register_device(keys / "devices" / name / "key.pub", name)
            if node is not None:  # else it was registered before the list was written
                entries[key] = NodeEntry(node, name)
    atomic.write_bytes(registry_path, msgspec.json.encode(entries))
