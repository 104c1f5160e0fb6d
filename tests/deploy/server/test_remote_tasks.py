"""Rehearsals of asynchronous runs: real devices, in the order of virtual time."""

from contextlib import suppress

import pytest
from tests.deploy.in_process import (
    InProcessTransport,
    compute_simulated_digest,
    make_devices,
    make_experiment,
    serve_rounds,
)

from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import NotEnoughDevices
from pliant.engine.ledger import verify_records

CHANGING = {"speed": {"type": "changing", "low": 0.3, "high": 1.0, "per_round": 2.0}}
LOCAL = {"batch": 16}


def buffer(inner="fedavg", **options):
    inner = {"type": inner, "local": LOCAL} if isinstance(inner, str) else inner
    return {"type": "fedbuff", "buffer": 2, "concurrency": 3, "inner": inner} | options


def make_async(method, late="partial", **fields):
    rules = {"late": late, "grace": 0.0}
    fields = {"rounds": 4, "data": {"proxy": 7900}} | fields
    return make_experiment(method, fleet={"size": 4, **CHANGING}, rules=rules, **fields)


STAGES = [{"until": 0.5, "width": 0.5}, {}]
PROGRESSIVE = {"type": "progressive", "stages": STAGES, "local": {"batch": 16, "epochs": 2}}


@pytest.mark.parametrize(
    "method",
    [
        {"type": "fedasync", "concurrency": 3, "local": LOCAL},
        {"type": "asofed", "concurrency": 2, "local": LOCAL},  # devices keep gradients
        buffer(),
        buffer("scaffold"),
        buffer("heterofl"),  # packed updates, of rows that the server chooses
        buffer("distreal", work="seconds"),
        buffer(PROGRESSIVE),
    ],
    ids=["fedasync", "asofed", "fedavg", "scaffold", "heterofl", "distreal", "progressive"],
)
def test_a_rehearsal_ends_with_the_simulated_weights(tmp_path, method):
    experiment = make_async(method)
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert verify_records(records) == 4
    assert records[-1].digest == compute_simulated_digest(experiment)


def test_devices_without_rounds_compress_updates_as_the_simulation_does(tmp_path):
    experiment = make_async(buffer(), compression={"type": "topk", "share": 0.2})
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert records[-1].digest == compute_simulated_digest(experiment)


class Killed(BaseException):
    """The server's process ends here."""


def test_kills_of_server_and_devices_change_nothing(tmp_path):
    experiment, calls = make_async(buffer("scaffold")), []

    def fail_sometimes(device, round, raw):
        calls.append(device)
        if len(calls) in (2, 5, 9):
            raise Killed
        return RawReply(device, None, "gone") if len(calls) in (3, 7) else raw

    for _ in range(4):  # devices restart, too
        transport = InProcessTransport(make_devices(experiment, tmp_path), fail_sometimes)
        with suppress(Killed):
            records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert len(calls) > 9
    assert verify_records(records) == 4
    assert records[-1].digest == compute_simulated_digest(experiment)


def test_a_device_that_never_answers_ends_the_rehearsal(tmp_path):
    experiment = make_async(buffer())

    def lose(device, round, raw):
        return RawReply(device, None, "gone") if device == 1 else raw

    transport = InProcessTransport(make_devices(experiment, tmp_path), lose)
    with pytest.raises(NotEnoughDevices, match="device 1 sent no update: dropped: gone"):
        serve_rounds(experiment, transport, tmp_path / "run", pace="simulated", retries=2)
