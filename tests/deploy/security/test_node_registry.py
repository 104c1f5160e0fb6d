"""Registration of keys with Flower, with a fake connection to it."""

import shutil

from pliant.deploy.security.certificates import make_device_key
from pliant.deploy.security.node_registry import register_devices


class FakeControl:
    def __init__(self):
        self.calls, self.number = [], 100

    def register_device(self, public_key, name):
        self.calls.append(("register", name))
        self.number += 1
        return self.number

    def unregister_device(self, node):
        self.calls.append(("unregister", node))


def make_key_folders(tmp_path, *names):
    for name in names:
        make_device_key(tmp_path / "devices" / name)


def test_replaced_and_removed_keys_are_unregistered(tmp_path):
    make_key_folders(tmp_path, "0", "1", "2")
    registry, control = tmp_path / "registered.json", FakeControl()
    register_devices(tmp_path, registry, control)
    assert control.calls == [("register", "0"), ("register", "1"), ("register", "2")]
    control.calls.clear()
    register_devices(tmp_path, registry, control)
    assert control.calls == []  # nothing has changed
    for name in ("0", "1"):
        shutil.rmtree(tmp_path / "devices" / name)
    make_key_folders(tmp_path, "0")
    register_devices(tmp_path, registry, control)
    assert control.calls == [("unregister", 101), ("unregister", 102), ("register", "0")]


def test_a_key_moved_to_another_device_is_valid_for_that_device_only(tmp_path):
    make_key_folders(tmp_path, "0")
    registry, control = tmp_path / "registered.json", FakeControl()
    register_devices(tmp_path, registry, control)
    shutil.move(tmp_path / "devices" / "0", tmp_path / "devices" / "7")
    control.calls.clear()
    register_devices(tmp_path, registry, control)
    assert control.calls == [("unregister", 101), ("register", "7")]
