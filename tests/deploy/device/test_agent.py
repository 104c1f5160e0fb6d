"""How a device handles a request: its owner's limits, its own files, the time left."""

import math
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tests.deploy.in_process import make_context, make_devices, make_experiment, make_own_experiment
from tests.waiting import LIMIT, connect_unix

from pliant.deploy.device import agent as agent_module
from pliant.deploy.device.agent import DeviceAgent, localise_config
from pliant.deploy.device.host import DeviceSetup, HostStatus, Limits
from pliant.deploy.device.worker import run_worker
from pliant.deploy.messages import (
    TrainReply,
    TrainRequest,
    decode_message,
    encode_for_devices,
    encode_message,
)
from pliant.deploy.server.rounds import DeviceTransport, make_run
from pliant.deploy.settings import ARRIVAL_HEADER, ServerSettings
from pliant.deploy.step_times import StepTimeCurve
from pliant.value import encode

IDLE_HOST = HostStatus(cores=1.0, load=0.0, is_charging=None, is_hot=False)
RECORDED = {"speed": {"type": "recorded", "path": "/etc/secret"}, "size": 3}


class Clock:
    """A clock that advances with the work done, and by sleeping."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The clock of a machine on which a full mini-batch takes one second."""
    monkeypatch.setattr(agent_module, "read_host", lambda: IDLE_HOST)
    line = np.array([0.05, 1.0])
    monkeypatch.setattr(agent_module, "load_or_calibrate", lambda *_: StepTimeCurve(line, line))
    iter_steps, clock = agent_module.iter_steps, Clock()

    def iter_timed_steps(context, key, choose):
        for step in iter_steps(context, key, choose):
            yield step
            clock.now += step.macs / context.full_macs / 16

    monkeypatch.setattr(agent_module, "iter_steps", iter_timed_steps)
    return clock


def make_request(experiment, hello_reply=None):
    context = make_context(experiment)
    messages = SimpleNamespace(hello_replies={} if hello_reply is None else {0: hello_reply})
    transport = DeviceTransport(experiment, ServerSettings(), messages)
    transport.prepare(make_run(experiment, context), [0])
    return transport.requests[0]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_server_that_chooses_rows_respects_the_owner_s_limits(share, clock, tmp_path):
    experiment = make_experiment("heterofl", fleet={"round_seconds": 6.0})  # five full mini-batches
    limits = Limits(cpu_share=share)
    device = DeviceAgent(0, tmp_path, limits, clock=clock, sleep=clock.sleep)
    hello = device.handle_request(encode_message(TrainRequest("hello", encode(experiment), 0)))
    assert decode_message(hello, TrainReply)[0].curve[-1][1] == pytest.approx(1.0 / share)
    request = make_request(experiment, hello)
    assert (request.row == 4) == (share == 1.0)  # the full network only with enough time
    reply = decode_message(device.handle_request(bytes(request.raw)), TrainReply)[0]
    assert reply.kind == "update"
    assert reply.seconds <= 6.0


def test_time_in_the_queue_counts(clock, tmp_path):
    experiment = make_experiment(
        "distreal", fleet={"round_seconds": 6.0}, rules={"late": "partial"}
    )
    request = make_request(experiment)
    replies = {}
    for queued in (0.0, 4.0):
        device = DeviceAgent(0, tmp_path / str(queued), Limits(), clock=clock)
        replies[queued] = decode_message(
            device.handle_request(bytes(request.raw), queued), TrainReply
        )[0]
        assert replies[queued].seconds <= 6.0
    assert replies[4.0].macs < replies[0.0].macs


def test_a_worker_measures_how_long_a_request_was_queued(tmp_path):
    queue_times, both_sent = [], threading.Event()

    class SlowAgent:
        def __init__(self, *_):
            pass

        def handle_request(self, raw, queued):
            queue_times.append(queued)
            if raw == b"first":
                assert both_sent.wait(LIMIT)
                time.sleep(0.05)
            return raw

    path = tmp_path / "socket"
    setup = DeviceSetup(0, str(tmp_path), Limits(), socket=str(path), idle_seconds=LIMIT)
    # it would end after the idle time only
    threading.Thread(target=run_worker, args=(setup, SlowAgent), daemon=True).start()
    with connect_unix(path) as first, connect_unix(path) as second:
        first.send_bytes(ARRIVAL_HEADER.pack(time.monotonic()) + b"first")
        second.send_bytes(ARRIVAL_HEADER.pack(time.monotonic()) + b"second")
        both_sent.set()
        assert (first.recv_bytes(), second.recv_bytes()) == (b"first", b"second")
    assert queue_times[0] == 0.0
    assert queue_times[1] >= 0.05


def test_a_worker_that_has_started_is_not_wanted_any_more(tmp_path):
    """Else its supervisor would start it again when it ends after its idle time."""
    wanted = tmp_path / "socket.wanted"
    wanted.touch()
    setup = DeviceSetup(0, str(tmp_path), Limits(), socket=str(tmp_path / "socket"))
    run_worker(msgspec.structs.replace(setup, idle_seconds=0.01))
    assert not wanted.exists()


def test_a_device_that_measures_itself_opens_no_recording():
    config = encode(make_experiment()) | {"fleet": RECORDED}
    assert "path" not in str(localise_config(config, Limits()))
    nested = encode(make_experiment()) | {
        "fleet": {"size": 3, "classes": [{"speed": RECORDED["speed"]}]}
    }
    assert "path" not in str(localise_config(nested, Limits()))


def test_simulated_pacing_reads_recordings_from_the_owner_s_folder_only(tmp_path):
    config = encode(make_experiment()) | {"fleet": RECORDED}
    with pytest.raises(ValueError, match="expected --data FOLDER on the device"):
        localise_config(config, Limits(), "simulated")
    localised = localise_config(config, Limits(data=str(tmp_path)), "simulated")
    assert localised["fleet"]["speed"]["path"] == str(tmp_path / "secret")


def test_a_device_needs_no_recording_that_only_the_server_has(tmp_path):
    experiment = make_experiment()
    [device, *_] = make_devices(experiment, tmp_path).values()
    config = encode(experiment)
    config = config | {"fleet": msgspec.to_builtins(config["fleet"]) | RECORDED}
    reply = device.handle_request(encode_message(TrainRequest("hello", config, 0)))
    assert decode_message(reply, TrainReply)[0].kind == "hello"


def test_a_device_runs_files_from_its_owner_s_folder_only(tmp_path):
    config = encode(make_experiment())
    module = config | {"network": {"name": "os:system"}}
    with pytest.raises(ValueError, match="expected --code FOLDER on the device for 'os:system'"):
        localise_config(module, Limits())
    with pytest.raises(ValueError, match=r"expected FILE\.py:FUNCTION for a device"):
        localise_config(module, Limits(code=str(tmp_path)))
    file = config | {"network": {"name": "/home/me/net.py:build"}}
    name = localise_config(file, Limits(code=str(tmp_path)))["network"]["name"]
    assert name == f"{tmp_path / 'net.py'}:build"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("method", "local", {"epochs": 10**6}),
        ("method", "local", {"batch": 10**9}),
        ("network", "options", {"width": 10**6}),
        ("network", "options", {"width": math.nan}),
        ("fleet", "size", 10**9),
    ],
)
def test_a_device_refuses_more_work_than_any_experiment_needs(section, key, value):
    config = encode(make_experiment())
    localise_config(config, Limits())
    config[section] = config[section] | {key: value}
    with pytest.raises(ValueError, match="expected at most"):
        localise_config(config, Limits())


def test_data_that_exit_the_process_are_a_failure(tmp_path, caplog):
    (tmp_path / "own.py").write_text("def images():\n    raise SystemExit(0)\n")
    agent = DeviceAgent(0, tmp_path / "state", Limits(dataset=f"{tmp_path}/own.py:images"))
    config = encode_for_devices(make_own_experiment())
    raw = agent.handle_request(encode_message(TrainRequest("hello", config, 0)))
    reply, _ = decode_message(raw, TrainReply)
    assert (reply.kind, reply.reason) == ("failed", "SystemExit, see the log of the device")


def test_a_failure_does_not_tell_the_server_where_the_data_are(tmp_path, caplog):
    private = tmp_path / "private"
    private.mkdir()
    (private / "patients.npz").write_bytes(b"not an archive")
    agent = DeviceAgent(0, tmp_path / "state", Limits(data=str(private)))
    config = encode_for_devices(make_own_experiment())
    raw = agent.handle_request(encode_message(TrainRequest("hello", config, 0)))
    reply, _ = decode_message(raw, TrainReply)
    assert reply.kind == "failed"
    assert str(private).encode() not in raw
    assert b"patients" not in raw
    assert reply.reason.endswith("see the log of the device")
    assert str(private) in caplog.text
