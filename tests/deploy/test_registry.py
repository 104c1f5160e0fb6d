"""Keys that Flower is told of, with a command of our own in the place of Flower's."""

import shutil
import subprocess

import pytest

from pliant.deploy.keys import device_key
from pliant.deploy.registry import register


class Flwr:
    def __init__(self):
        self.calls, self.number = [], 100

    def __call__(self, *arguments):
        self.calls.append(arguments)
        self.number += 1
        said = f"SuperNode {self.number} registered successfully."
        return subprocess.CompletedProcess(arguments, 0, said, "")


def folders(tmp_path, *names):
    for name in names:
        device_key(tmp_path / "devices" / name)


def test_keys_that_were_replaced_or_removed_count_no_longer(tmp_path):
    folders(tmp_path, "0", "1", "2")
    known, flwr = tmp_path / "registered.json", Flwr()
    register(tmp_path, known, "pliant", flwr)
    assert sorted(call[-1] for call in flwr.calls) == ["0", "1", "2"]
    flwr.calls.clear()
    register(tmp_path, known, "pliant", flwr)
    assert flwr.calls == []  # nothing has changed
    for name in ("0", "1"):
        shutil.rmtree(tmp_path / "devices" / name)
    folders(tmp_path, "0")
    register(tmp_path, known, "pliant", flwr)
    assert [call[1] for call in flwr.calls] == ["unregister", "unregister", "register"]
    assert flwr.calls[-1][-1] == "0"


def test_a_key_that_is_given_to_another_device_speaks_for_that_one_only(tmp_path):
    folders(tmp_path, "0")
    known, flwr = tmp_path / "registered.json", Flwr()
    register(tmp_path, known, "pliant", flwr)
    shutil.move(tmp_path / "devices" / "0", tmp_path / "devices" / "7")
    flwr.calls.clear()
    register(tmp_path, known, "pliant", flwr)
    assert [(call[1], call[-1]) for call in flwr.calls] == [
        ("unregister", "pliant"),
        ("register", "7"),
    ]


def test_a_key_that_flower_does_not_take_is_told_in_one_line(tmp_path):
    folders(tmp_path, "0")

    def refusing(*arguments):
        return subprocess.CompletedProcess(arguments, 1, "", "it is\nfull")

    with pytest.raises(ChildProcessError, match="device 0 was not registered: it is full"):
        register(tmp_path, tmp_path / "registered.json", "pliant", refusing)
