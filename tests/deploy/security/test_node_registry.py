"""Registration of keys with Flower, with a fake `flwr` command."""

import shutil
import subprocess

import pytest

from pliant.deploy.security.certificates import make_device_key
from pliant.deploy.security.node_registry import register_devices


class FakeFlwr:
    def __init__(self):
        self.calls, self.number = [], 100

    def __call__(self, *arguments):
        self.calls.append(arguments)
        self.number += 1
        output = f"SuperNode {self.number} registered successfully."
        return subprocess.CompletedProcess(arguments, 0, output, "")


def make_key_folders(tmp_path, *names):
    for name in names:
        make_device_key(tmp_path / "devices" / name)


def test_replaced_and_removed_keys_are_unregistered(tmp_path):
    make_key_folders(tmp_path, "0", "1", "2")
    registry, flwr = tmp_path / "registered.json", FakeFlwr()
    register_devices(tmp_path, registry, "pliant", flwr)
    assert sorted(call[-1] for call in flwr.calls) == ["0", "1", "2"]
    flwr.calls.clear()
    register_devices(tmp_path, registry, "pliant", flwr)
    assert flwr.calls == []  # nothing has changed
    for name in ("0", "1"):
        shutil.rmtree(tmp_path / "devices" / name)
    make_key_folders(tmp_path, "0")
    register_devices(tmp_path, registry, "pliant", flwr)
    assert [call[1] for call in flwr.calls] == ["unregister", "unregister", "register"]
    assert flwr.calls[-1][-1] == "0"


def test_a_key_moved_to_another_device_is_valid_for_that_device_only(tmp_path):
    make_key_folders(tmp_path, "0")
    registry, flwr = tmp_path / "registered.json", FakeFlwr()
    register_devices(tmp_path, registry, "pliant", flwr)
    shutil.move(tmp_path / "devices" / "0", tmp_path / "devices" / "7")
    flwr.calls.clear()
    register_devices(tmp_path, registry, "pliant", flwr)
    assert [(call[1], call[-1]) for call in flwr.calls] == [
        ("unregister", "pliant"),
        ("register", "7"),
    ]


def test_a_key_that_flower_rejects_is_reported_in_one_line(tmp_path):
    make_key_folders(tmp_path, "0")

    def fail(*arguments):
        return subprocess.CompletedProcess(arguments, 1, "", "it is\nfull")

    with pytest.raises(ChildProcessError, match="device 0 was not registered: it is full"):
        register_devices(tmp_path, tmp_path / "registered.json", "pliant", fail)
