"""A device's own data: what the server may know and use of them is the owner's to say."""

import numpy as np
import pytest
from tests.deploy.in_process import make_own_experiment

from pliant.data.declared import DataDeclaration
from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import HostStatus, Limits
from pliant.deploy.device.own_data import OwnDataReader
from pliant.deploy.messages import (
    TrainReply,
    TrainRequest,
    decode_message,
    encode_for_devices,
    encode_message,
)
from pliant.methods.base import TaskKey

KEY = TaskKey(0, 0, 0)
FORM = make_own_experiment().network.image_form
CODE = """
import torch
from pathlib import Path
import pliant as pl

def load():
    count = int(Path(__file__).with_name("count").read_text())
    pixels = torch.arange(count * 784).reshape(count, 1, 28, 28).to(torch.uint8)
    return pl.ImageDataset.from_tensors(pixels, torch.arange(count) % 10)
"""


def write_images(folder, count, classes=10):
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), np.uint8)
    np.savez(folder / "a.npz", images=images, labels=np.arange(count) % classes)


def greet(folder, **limits):
    agent = DeviceAgent(0, folder / "state", Limits(**limits))
    experiment = make_own_experiment()
    hello = TrainRequest("hello", encode_for_devices(experiment), -1)
    return decode_message(agent.handle_request(encode_message(hello)), TrainReply)[0]


def test_a_device_declares_its_data(tmp_path):
    write_images(tmp_path, 50, classes=3)
    declared = OwnDataReader(Limits(data=str(tmp_path), test_share=0.0)).declare(FORM)
    assert declared == DataDeclaration(50, 0, (0, 1, 2))
    limits = Limits(data=str(tmp_path), max_samples=20, hide_classes=True)
    declared = OwnDataReader(limits).declare(FORM)
    assert (declared.max_samples, declared.classes) == (20, None)
    assert 0 < declared.tests < 20


def test_no_more_images_are_used_than_declared_or_allowed(tmp_path):
    write_images(tmp_path, 50)
    reader = OwnDataReader(Limits(data=str(tmp_path), test_share=0.0))
    assert reader.select(FORM, DataDeclaration(50), KEY).sizes() == (50,)
    some = reader.select(FORM, DataDeclaration(30), KEY)
    assert some.sizes() == (30,)
    other = reader.select(FORM, DataDeclaration(30), TaskKey(0, 1, 0))
    assert some.shares[0].tolist() != other.shares[0].tolist()  # drawn anew in every round
    data = reader.select(FORM, DataDeclaration(50, 0, (3, 4)), KEY)
    assert (data.sizes(), data.list_classes(0)) == ((10,), (3, 4))
    # whatever the server says
    limited = OwnDataReader(Limits(data=str(tmp_path), test_share=0.0, max_samples=7))
    assert limited.select(FORM, DataDeclaration(50), KEY).sizes() == (7,)


def test_changed_files_are_read_again(tmp_path):
    write_images(tmp_path, 50)
    reader = OwnDataReader(Limits(data=str(tmp_path), test_share=0.0))
    first = reader.read(FORM)
    assert reader.read(FORM) is first
    write_images(tmp_path, 60)
    assert len(reader.read(FORM).train) == 60


def test_a_function_is_called_in_every_round(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    reader = OwnDataReader(Limits(dataset=f"{tmp_path / 'mine.py'}:load", test_share=0.0))
    for count in (20, 30):
        (tmp_path / "count").write_text(str(count))
        assert len(reader.read(FORM).train) == count


def test_a_device_without_data_says_so(tmp_path):
    reply = greet(tmp_path)
    assert reply.kind == "failed"
    assert "expected --data FOLDER or --dataset FILE.py:FUNCTION on the device" in reply.reason
    write_images(tmp_path, 0)
    assert "expected images for training" in greet(tmp_path, data=str(tmp_path / "a.npz")).reason


def test_a_device_on_battery_declares_its_data_but_does_not_compute(tmp_path, monkeypatch):
    host = HostStatus(cores=1.0, load=0.0, is_charging=False, is_hot=False)
    monkeypatch.setattr("pliant.deploy.device.agent.read_host", lambda: host)
    write_images(tmp_path, 50)
    reply = greet(tmp_path, data=str(tmp_path / "a.npz"), only_when_charging=True)
    assert (reply.kind, reply.curve, reply.reason) == ("declined", (), "it is not charging")
    assert reply.declaration.max_samples < 50


@pytest.mark.parametrize("field", ["proxy", "holdout"])
def test_devices_are_not_told_what_the_server_has(field):
    experiment = make_own_experiment(server={field: "/home/me/images"})
    assert "/home/me" not in str(encode_for_devices(experiment))
