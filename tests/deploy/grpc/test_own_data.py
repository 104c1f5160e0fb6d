"""Split learning on devices with their own data."""

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tests.deploy.grpc_in_process import (
    connect_devices,
    make_experiment,
    make_server_run,
    run_with_devices,
    simulate_rounds,
)
from tests.waiting import LIMIT

from pliant.deploy.device.host import Limits
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.server.rounds import NotEnoughDevices
from pliant.engine.run_store import load_run_state
from pliant.experiment.build import build_experiment

FORM = {"input": [1, 16, 16], "classes": 3}


@pytest.fixture
def source(tmp_path):
    """Return the simulated data of an experiment, whose shares are in a folder per device."""
    experiment = make_experiment(tmp_path)
    _, data = build_experiment(experiment)
    tests = np.arange(len(data.test))
    for device, share in enumerate(data.shares):
        for part, images, indices in (("train", data.train, share), ("test", data.test, tests)):
            folder = tmp_path / str(device) / part
            folder.mkdir(parents=True)
            pixels, labels = images.pixels[indices].numpy(), images.labels[indices].numpy()
            np.savez(folder / "images.npz", images=pixels, labels=labels)
    np.savez(tmp_path / "holdout.npz", images=data.test.pixels, labels=data.test.labels)
    return data


def make_own_experiment(folder, data, method="adasplit", **fields):
    """Make an experiment for devices with their own data, normalised as in the simulation."""
    network = {"name": f"{folder}/tiny.py:network", **FORM}
    network |= {"mean": list(data.train.mean), "std": list(data.train.std)}
    return make_experiment(folder, method, network=network, **fields)


def make_devices(folder, **limits):
    return {
        number: SplitDevice(
            number,
            folder / f"device{number}",
            Limits(code=str(folder), data=str(folder / str(number)), **limits),
        )
        for number in range(3)
    }


@pytest.mark.parametrize("method", ["adasplit", "splitfed", "split", "oneshot"])
def test_own_data_train_the_network_of_the_simulation(tmp_path, source, method):
    """The server tests the network if it has the parts and images; else the devices do."""
    server = {"holdout": str(tmp_path / "holdout.npz")} if method == "splitfed" else {}
    experiment = make_own_experiment(tmp_path, source, method, server=server)
    *_, simulated = simulate_rounds(experiment)
    data = {"name": "expected to be loaded by nobody"}
    hidden = msgspec.structs.replace(
        experiment, data=msgspec.structs.replace(experiment.data, **data)
    )
    devices = make_devices(tmp_path, hide_classes=method == "split")
    *_, record = run_with_devices(hidden, tmp_path, devices=devices, pace="measured")
    assert record.digest == simulated.digest
    # the simulation evaluates on all test images, which are those of every device
    assert record.personal.per_device == simulated.personal.per_device
    declared = load_run_state(tmp_path / "run").declarations
    assert [declared[number].max_samples for number in range(3)] == list(source.sizes())


def test_a_holdout_is_refused_if_clients_keep_their_parts(tmp_path, source):
    server = {"holdout": str(tmp_path / "holdout.npz")}
    experiment = make_own_experiment(tmp_path, source, server=server)
    with pytest.raises(ValueError, match=r"no \[server\] holdout .* they test on their own images"):
        make_server_run(experiment, pace="measured")


def run_until_all_are_refused(experiment, folder, monkeypatch, **limits):
    """Let the server's patience end as soon as it has refused all devices."""
    run = make_server_run(experiment, pace="measured")
    give_up = time.monotonic() + LIMIT  # a device that ends in another way is never refused

    def read_clock():
        has_refused_all = all(remote.problem for remote in run.clients.values())
        return 2 * LIMIT if has_refused_all or time.monotonic() > give_up else 0.0

    clock = SimpleNamespace(monotonic=read_clock, sleep=time.sleep)
    monkeypatch.setattr("pliant.deploy.grpc.server_main.time", clock)
    with connect_devices(make_devices(folder, **limits), run.grpc_server.port, folder):
        list(run.run_rounds(folder / "run"))


def test_an_impossible_declaration_is_refused(tmp_path, source, monkeypatch):
    experiment = make_own_experiment(tmp_path, source, server={"max_samples": 5})
    message = r"got 0; device 0: expected 1 to 5 samples .* got 17; device 1: "
    with pytest.raises(NotEnoughDevices, match=message):
        run_until_all_are_refused(experiment, tmp_path, monkeypatch)


def test_other_data_than_declared_are_refused_when_a_run_resumes(tmp_path, source, monkeypatch):
    experiment = make_own_experiment(tmp_path, source)
    first = make_server_run(experiment, pace="measured")
    with connect_devices(make_devices(tmp_path), first.grpc_server.port, tmp_path):
        rounds = first.run_rounds(tmp_path / "run")
        next(rounds)
        rounds.close()
    with pytest.raises(NotEnoughDevices, match="declaration, 17 samples, got others, 9 samples"):
        run_until_all_are_refused(experiment, tmp_path, monkeypatch, max_samples=9)
