"""Split methods over a real socket with TLS and keys: the same bits as in a simulation."""

import math
import re
from dataclasses import replace

import pytest
import torch
from tests.deploy.federation_keys import make_federation_keys
from tests.deploy.grpc_in_process import (
    make_devices,
    make_experiment,
    run_with_devices,
    simulate_rounds,
)
from tests.split.small_split import make_faulty
from tests.waiting import LIMIT

from pliant.deploy.server.presence import read_presence
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.split.payload import Payload


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_federation_keys(folder, devices=3)
    return folder


METHODS = {
    "split": {},
    "splitfed": {"payload": {"dtype": "float16"}},
    "v2": {"type": "splitfed", "version": 2},
    "adasplit": {"kappa": 0.5},
    "relay": {"type": "adasplit", "kappa": 0.5, "relay": True, "gradient": True},
    "auxsplit": {"every": 2, "align": 1},
    "oneshot": {"local_share": 0.5, "personal_share": 0.0},
    "joined": {"type": "split", "joined": True},
    "once": {"type": "adasplit", "objective": "none", "kappa": 0.0, "send_once": 10**9},
    "hybrid": {"type": "adasplit", "kappa": 0.0, "elastic": True, "beta": 1e-4},
}


@pytest.mark.parametrize("name", METHODS)
def test_simulated_pace_has_the_records_and_weights_of_the_simulation(name, keys, tmp_path):
    fleet = {"size": 3, "round_seconds": 60.0, "speed": {"type": "constant", "low": 0.4}}
    experiment = make_experiment(tmp_path, name, fields=METHODS[name], fleet=fleet)
    records = run_with_devices(experiment, tmp_path, keys)
    simulate_rounds(experiment, tmp_path / "simulated")
    assert records == list(read_records(tmp_path / "simulated"))
    assert records[-1].digest is not None
    presence = read_presence(tmp_path / "run")
    assert (presence.online, set(presence.last_seen)) == ((), {0, 1, 2})


@pytest.mark.parametrize("pace", ["simulated", "measured"])
def test_only_selected_devices_train(pace, keys, tmp_path):
    experiment = make_experiment(tmp_path, "split", per_round=2)
    records = run_with_devices(experiment, tmp_path, keys, pace=pace)
    simulated = simulate_rounds(experiment)
    assert records[-1].digest == simulated[-1].digest
    assert records[-1].outcomes == simulated[-1].outcomes
    assert verify_records(records) == 2


# test_traffic.py has the first two at this pace too
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in ("splitfed", "adasplit")),
     "auxsplit", "oneshot"],
)  # fmt: skip
def test_measured_pace_has_the_weights_and_costs_of_the_simulation(name, keys, tmp_path):
    experiment = make_experiment(tmp_path, name, fields=METHODS[name])
    records = run_with_devices(experiment, tmp_path, keys, pace="measured")
    assert verify_records(records) == 2
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    for real, virtual in zip(rounds, simulate_rounds(experiment), strict=True):
        assert real.digest == virtual.digest
        assert (real.personal is None) == (virtual.personal is None)
        if real.personal is not None:
            assert real.personal.per_device == virtual.personal.per_device
        assert real.macs == virtual.macs
        assert (real.up, real.down) == (virtual.up, virtual.down)
        assert real.control > 0  # what is sent besides; see test_traffic.py
        assert real.exchange.dense == virtual.exchange.dense
        assert real.exchange.relayed == virtual.exchange.relayed
        assert real.outcomes == virtual.outcomes == {"finished": 3}
        assert 0 < real.busy < 3 * real.seconds < 3 * LIMIT


def test_a_device_that_sends_nan_is_rejected_by_name_and_changes_nothing(keys, tmp_path):
    def corrupt(client, message):
        if client != 1:
            return message
        return replace(message, body=Payload().encode(torch.full(message.shape, math.nan)))

    experiment = make_experiment(tmp_path, "splitfed")
    devices = make_devices(range(3), tmp_path)
    build_honest_client = devices[1]._build_client

    def build_corrupt_client(encoded_experiment):
        client = build_honest_client(encoded_experiment)
        honest_forward = client.forward
        client.forward = lambda: corrupt(1, honest_forward())
        return client

    devices[1]._build_client = build_corrupt_client
    records = run_with_devices(experiment, tmp_path, keys, devices)
    simulate_rounds(experiment, tmp_path / "simulated", make_client=make_faulty(corrupt))
    assert records == list(read_records(tmp_path / "simulated"))
    tasks = [task for task in records if isinstance(task, TaskRecord) and task.device == 1]
    [outcome] = {task.outcome for task in tasks}
    assert outcome == "rejected: client 1: expected activations of finite numbers, got NaN"


def test_a_device_whose_part_has_other_shapes_is_named_and_left_out(keys, tmp_path):
    experiment = make_experiment(tmp_path, "splitfed", rounds=1)
    devices = make_devices(range(3), tmp_path)
    execute = devices[2]._execute

    def execute_wrongly(request, tensors):
        shape, result = execute(request, tensors)
        if request.kind != "params":
            return shape, result
        return shape, {name: tensor[:1] for name, tensor in result.items()}

    devices[2]._execute = execute_wrongly
    records = run_with_devices(experiment, tmp_path, keys, devices, pace="measured")
    [task] = [task for task in records if isinstance(task, TaskRecord) and task.device == 2]
    assert task.outcome.startswith("rejected: client 2: expected part ")
    [reason] = task.exchange.refused
    assert re.match(r"client 2: expected part 'device\.stage1\.0\.\w+' of shape \(4,", reason)
