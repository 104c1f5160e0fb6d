"""Split methods over a real socket with TLS and keys: what a simulation gives, bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from split_near import described, devices_of, served, simulated

from pliant.deploy.keys import make_keys
from pliant.engine.ledger import RoundRecord, TaskRecord, check
from pliant.engine.store import events
from pliant.split.payload import Payload


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_keys(folder, devices=3)
    return folder


METHODS = {
    "split": {},
    "splitfed": {"payload": {"number": "float16"}},
    "v2": {"type": "splitfed", "version": 2},
    "adasplit": {"kappa": 0.5},
    "relay": {"type": "adasplit", "kappa": 0.5, "relay": True, "gradient": True},
    "hybrid": {"type": "adasplit", "kappa": 0.0, "elastic": True, "beta": 1e-4},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_rehearsal_has_the_records_and_the_weights_of_the_simulation(name, keys, tmp_path):
    fleet = {"size": 3, "round_seconds": 60.0, "speed": {"type": "constant", "low": 0.4}}
    experiment = described(tmp_path, name, fields=METHODS[name], fleet=fleet)
    found = served(experiment, tmp_path, keys)
    simulated(experiment, tmp_path / "simulated")
    assert found == list(events(tmp_path / "simulated"))
    assert found[-1].digest is not None


@pytest.mark.parametrize("name", ["splitfed", "adasplit"])
def test_on_the_wall_clock_weights_and_bytes_are_those_of_the_simulation(name, keys, tmp_path):
    experiment = described(tmp_path, name, fields=METHODS[name])
    found = served(experiment, tmp_path, keys, pace="measured")
    assert check(found) == 2
    rounds = [record for record in found if isinstance(record, RoundRecord)]
    for real, virtual in zip(rounds, simulated(experiment), strict=True):
        assert (real.digest, real.personal) == (virtual.digest, virtual.personal)
        assert (real.up, real.down, real.macs) == (virtual.up, virtual.down, virtual.macs)
        assert real.exchange.relayed == virtual.exchange.relayed
        assert real.ends == virtual.ends == {"finished": 3}
        assert 0 < real.busy < 3 * real.seconds < 3 * 60


def test_a_device_that_sends_nan_is_refused_by_name_and_changes_nothing(keys, tmp_path):
    def spoilt(client, message):
        if client != 1:
            return message
        return replace(message, body=Payload().encode(torch.full(message.shape, math.nan)))

    experiment = described(tmp_path, "splitfed")
    devices = devices_of(range(3), tmp_path)
    built = devices[1]._built

    def sabotaged(told):
        client = built(told)
        honest = client.message
        client.message = lambda: spoilt(1, honest())
        return client

    devices[1]._built = sabotaged
    found = served(experiment, tmp_path, keys, devices)
    simulated(experiment, tmp_path / "simulated", wire=spoilt)
    assert found == list(events(tmp_path / "simulated"))
    [end] = {task.end for task in found if isinstance(task, TaskRecord) and task.device == 1}
    assert end == "rejected: client 1: expected activations of finite numbers, got NaN"


def test_a_device_whose_part_has_other_shapes_is_named_and_left_out(keys, tmp_path):
    experiment = described(tmp_path, "splitfed", rounds=1)
    devices = devices_of(range(3), tmp_path)
    honest = devices[2]._do

    def lying(question, tensors):
        found = honest(question, tensors)
        if question.kind != "params":
            return found
        return {name: tensor[:1] for name, tensor in found.items()}

    devices[2]._do = lying
    found = served(experiment, tmp_path, keys, devices, pace="measured", allowance=5.0)
    [task] = [task for task in found if isinstance(task, TaskRecord) and task.device == 2]
    assert task.end == "partial"
    assert next(iter(task.exchange.refused)).startswith("client 2: expected (4, 1, 5, 5) of")
