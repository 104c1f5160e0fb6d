"""What a device does with an order: its user's limits, its own files, the time that is left."""

import threading
import time
from multiprocessing.connection import Client

import msgspec
import numpy as np
import pytest
from near import described, devices_of, world_of

from pliant.deploy import device as device_module
from pliant.deploy.curve import Curve
from pliant.deploy.desk import Desk, asks_of
from pliant.deploy.device import Device, local
from pliant.deploy.host import Hints, Limits
from pliant.deploy.letters import Order, packed, read_answer
from pliant.deploy.service import Service
from pliant.deploy.worker import CAME, Setup, work
from pliant.engine.store import Saved
from pliant.methods.base import State
from pliant.params import params_of
from pliant.value import encode

CALM = Hints(cores=1.0, load=0.0, battery=None, is_charging=None, is_hot=False)
RECORDED = {"speed": {"type": "recorded", "path": "/etc/secret"}, "size": 3}


class Mute:
    greetings: dict[int, bytes]

    def __init__(self, greetings):
        self.greetings = greetings


@pytest.fixture
def machine(monkeypatch):
    """A machine of which a full mini-batch takes a second, by a clock of the test's own."""
    monkeypatch.setattr(device_module, "hints", lambda: CALM)
    line = np.array([0.05, 1.0])
    monkeypatch.setattr(device_module, "calibrated", lambda *given: Curve(line, line))
    real, now = device_module.steps, [0.0]

    def steps(world, place, pace):
        full = world.net.macs(world.net.full, training=True)
        for step in real(world, place, pace):
            yield step
            now[0] += step.macs / full / 16

    monkeypatch.setattr(device_module, "steps", steps)
    return now


def order_for(experiment, greeting=None):
    world = world_of(experiment)
    saved = Saved(0, 0.0, State(params_of(world.net.net)), {})
    link = Mute({} if greeting is None else {0: greeting})
    desk = Desk(experiment, world, link, Service(), saved, time.monotonic, time.sleep)
    return asks_of(desk, 0, [0])[0]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_server_that_chooses_knows_what_a_user_allows(share, machine, tmp_path):
    experiment = described("heterofl", fleet={"round_seconds": 6.0})  # five of a second each

    def rest(seconds):
        machine[0] += seconds

    limits = Limits(cpu_share=share)
    device = Device(0, tmp_path, limits, clock=lambda: machine[0], sleep=rest)
    hello = device.answer(packed(Order("hello", encode(experiment), 0)))
    assert read_answer(hello)[0].curve[-1][1] == pytest.approx(1.0 / share)
    ask = order_for(experiment, hello)
    assert (ask.row == 4) == (share == 1.0)  # the full network is for those who have the time
    answer = read_answer(device.answer(ask.letter))[0]
    assert answer.kind == "update"
    assert answer.seconds <= 6.0


def test_time_in_the_queue_is_gone(machine, tmp_path):
    experiment = described("distreal", fleet={"round_seconds": 6.0}, rules={"late": "partial"})
    ask = order_for(experiment)
    found = {}
    for queued in (0.0, 4.0):
        device = Device(0, tmp_path / str(queued), Limits(), clock=lambda: machine[0])
        found[queued] = read_answer(device.answer(ask.letter, queued))[0]
        assert found[queued].seconds <= 6.0
    assert found[4.0].macs < found[0.0].macs


def test_a_worker_knows_how_long_an_order_has_queued(tmp_path):
    found, is_asked = [], threading.Event()

    class Slow:
        def __init__(self, *given):
            pass

        def answer(self, raw, queued):
            found.append(queued)
            if raw == b"first":
                assert is_asked.wait(60.0)
                time.sleep(0.05)
            return raw

    path = tmp_path / "socket"
    setup = Setup(0, str(tmp_path), str(path), Limits(), 0.5)
    worker = threading.Thread(target=work, args=(setup, Slow))
    worker.start()
    while not path.exists():
        time.sleep(0.01)
    with Client(str(path), "AF_UNIX") as first, Client(str(path), "AF_UNIX") as second:
        first.send_bytes(CAME.pack(time.monotonic()) + b"first")
        second.send_bytes(CAME.pack(time.monotonic()) + b"second")
        is_asked.set()
        assert (first.recv_bytes(), second.recv_bytes()) == (b"first", b"second")
    worker.join()
    assert found[0] == 0.0
    assert found[1] >= 0.05


def test_a_device_that_measures_itself_opens_no_recording_of_a_server():
    told = encode(described()) | {"fleet": RECORDED}
    assert "path" not in str(local(told, Limits()))
    nested = encode(described()) | {"fleet": {"size": 3, "classes": [{"speed": RECORDED["speed"]}]}}
    assert "path" not in str(local(nested, Limits()))


def test_a_rehearsal_takes_recordings_from_its_user_s_folder_only(tmp_path):
    told = encode(described()) | {"fleet": RECORDED}
    with pytest.raises(ValueError, match="expected --data FOLDER on the device"):
        local(told, Limits(), "fleet")
    found = local(told, Limits(data=str(tmp_path)), "fleet")
    assert found["fleet"]["speed"]["path"] == str(tmp_path / "secret")


def test_a_recording_that_only_the_server_has_does_not_keep_a_device_away(tmp_path):
    experiment = described()
    [device, *_] = devices_of(experiment, tmp_path).values()
    told = encode(experiment)
    told = told | {"fleet": msgspec.to_builtins(told["fleet"]) | RECORDED}
    assert read_answer(device.answer(packed(Order("hello", told, 0))))[0].kind == "hello"


def test_a_device_runs_files_of_its_user_s_folder_only(tmp_path):
    told = encode(described())
    odd = told | {"network": {"name": "os:system"}}
    with pytest.raises(ValueError, match="expected --code FOLDER on the device for 'os:system'"):
        local(odd, Limits())
    with pytest.raises(ValueError, match=r"expected FILE\.py:FUNCTION for a device"):
        local(odd, Limits(code=str(tmp_path)))
    own = told | {"network": {"name": "/home/me/net.py:build"}}
    found = local(own, Limits(code=str(tmp_path)))["network"]["name"]
    assert found == f"{tmp_path / 'net.py'}:build"
