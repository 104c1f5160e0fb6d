from dataclasses import replace

import pytest
import torch

from pliant.deploy.device.state import load_device_state, save_device_state
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
