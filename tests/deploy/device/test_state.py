from dataclasses import replace

import pytest
import torch

from pliant.deploy.device.state import DeviceStateStore
from pliant.methods.scaffold import ScaffoldDeviceState
from pliant.storage import checkpoint, formats

STATE, NEW = ScaffoldDeviceState({"variate": torch.ones(2)}), ScaffoldDeviceState()


def test_the_merged_round_is_loaded_and_the_others_deleted(tmp_path):
    store = DeviceStateStore(tmp_path)
    store.save(3, STATE, {"weight": torch.zeros(1)})
    store.save(5, ScaffoldDeviceState({"variate": torch.full((2,), 5.0)}), {})  # not merged
    device_state, residual = DeviceStateStore(tmp_path).load(3, NEW)
    assert isinstance(device_state, ScaffoldDeviceState)
    assert device_state.control["variate"].tolist() == [1.0, 1.0]
    assert residual["weight"].tolist() == [0.0]
    assert DeviceStateStore(tmp_path).load(5, NEW) == (NEW, {})


def test_a_device_without_a_merged_round_starts_over(tmp_path):
    store = DeviceStateStore(tmp_path)
    store.save(0, STATE, {})
    assert store.load(None, NEW) == (NEW, {})
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_ignored(tmp_path):
    store = DeviceStateStore(tmp_path)
    store.save(3, STATE, {})
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert store.load(3, NEW) == (NEW, {})


def test_a_residual_alone_leaves_the_state_as_it_was(tmp_path):
    store = DeviceStateStore(tmp_path)
    store.save(3, None, {"weight": torch.ones(1)})
    device_state, residual = store.load(3, None)
    assert device_state is None
    assert residual["weight"].tolist() == [1.0]


def test_no_state_means_no_file(tmp_path):
    DeviceStateStore(tmp_path).save(3, None, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_format_is_ignored(tmp_path, monkeypatch):
    store = DeviceStateStore(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr(formats, "CHECKPOINT", replace(formats.CHECKPOINT, number=3))
        store.save(3, STATE, {})
    with pytest.raises(formats.UnsupportedFormat):
        checkpoint.load(next(tmp_path.iterdir()))
    assert store.load(3, NEW) == (NEW, {})
