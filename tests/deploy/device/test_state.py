import os
from dataclasses import replace

import pytest
import torch

from pliant.deploy.device.host import ReportableProblem
from pliant.deploy.device.state import (
    load_device_state,
    remove_old_states,
    save_device_state,
)
from pliant.methods.scaffold import ScaffoldDeviceState
from pliant.storage import checkpoint, formats

STATE, NEW = ScaffoldDeviceState({"variate": torch.ones(2)}), ScaffoldDeviceState()


def test_the_merged_round_is_loaded_and_the_others_deleted(tmp_path):
    save_device_state(tmp_path, 3, STATE, {"weight": torch.zeros(1)})
    save_device_state(
        tmp_path, 5, ScaffoldDeviceState({"variate": torch.full((2,), 5.0)}), {}
    )  # not merged
    device_state, residual = load_device_state(tmp_path, 3, NEW)
    assert isinstance(device_state, ScaffoldDeviceState)
    assert device_state.control["variate"].tolist() == [1.0, 1.0]
    assert residual["weight"].tolist() == [0.0]
    assert load_device_state(tmp_path, 5, NEW) == (NEW, {})


def test_a_device_without_a_merged_round_starts_over(tmp_path):
    save_device_state(tmp_path, 0, STATE, {})
    assert load_device_state(tmp_path, None, NEW) == (NEW, {})
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_ignored(tmp_path):
    save_device_state(tmp_path, 3, STATE, {})
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert load_device_state(tmp_path, 3, NEW) == (NEW, {})


def test_a_residual_alone_leaves_the_state_as_it_was(tmp_path):
    save_device_state(tmp_path, 3, None, {"weight": torch.ones(1)})
    device_state, residual = load_device_state(tmp_path, 3, None)
    assert device_state is None
    assert residual["weight"].tolist() == [1.0]


def test_no_state_means_no_file(tmp_path):
    save_device_state(tmp_path, 3, None, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_format_is_ignored(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(formats, "CHECKPOINT", replace(formats.CHECKPOINT, number=3))
        save_device_state(tmp_path, 3, STATE, {})
    with pytest.raises(formats.UnsupportedFormat):
        checkpoint.load(next(tmp_path.iterdir()))
    assert load_device_state(tmp_path, 3, NEW) == (NEW, {})


def write_state(folder, size, age):
    folder.mkdir()
    (folder / "round-00000001.ckpt").write_bytes(bytes(size))
    os.utime(folder, (1e9 - age, 1e9 - age))


def test_states_of_old_experiments_are_removed_and_the_quota_holds(tmp_path):
    for name, size, age in (("a", 10, 1.0), ("b", 20, 2.0), ("c", 30, 3.0), ("d", 1, 1e8)):
        write_state(tmp_path / name, size, age)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker.log").write_text("not a state")
    remove_old_states(tmp_path / "a", 60.0, now=1e9)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "logs"}  # d is old
    remove_old_states(tmp_path / "a", 30.0, now=1e9)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "logs"}  # c was the oldest
    with pytest.raises(ReportableProblem, match="expected a state of at most 9 bytes, got 10"):
        remove_old_states(tmp_path / "a", 9.0, now=1e9)


def test_only_its_owner_reads_a_state(tmp_path):
    save_device_state(tmp_path, 1, None, {"x": torch.zeros(1)})
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
