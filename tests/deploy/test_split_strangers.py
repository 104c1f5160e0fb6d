"""Whoever has no business at the server's door is sent away in one line, and the run goes on."""

import socket
import threading

import grpc
import pytest
from split_near import described, devices_of, dialler, dialling, service_of, simulated

from pliant.deploy import split_hub
from pliant.deploy.keys import device_key, make_keys
from pliant.deploy.split_frames import Answer, Hello, Proof, framed
from pliant.deploy.split_stream import Dialler


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_keys(folder, devices=3)
    return folder


@pytest.fixture
def service(keys, tmp_path):
    experiment = described(tmp_path, rounds=1)
    found = service_of(experiment, keys)
    found.hub.start()
    yield found
    found.hub.close()


def test_a_key_that_is_not_registered_is_refused_in_one_line(service, keys, tmp_path):
    [device] = devices_of([0], tmp_path).values()
    key = device_key(tmp_path / "stranger")[0]
    place, own = f"127.0.0.1:{service.hub.port}", {"ca": keys / "ca.crt", "key": key}
    stranger = Dialler(device, place, process="one", **own)
    with pytest.raises(PermissionError, match=r"device 0: expected a registered key$"):
        stranger.attend()
    [unknown] = devices_of([7], tmp_path).values()
    other = Dialler(unknown, place, process="two", **own)
    with pytest.raises(PermissionError, match=r"device 7: expected a registered key$"):
        other.attend()


def test_a_device_of_another_authority_hangs_up_in_one_line(service, tmp_path):
    make_keys(tmp_path / "others", devices=1)
    [device] = devices_of([0], tmp_path).values()
    with pytest.raises(PermissionError, match="expected a certificate of the authority in"):
        dialler(device, service.hub.port, tmp_path / "others").attend()


def test_a_device_without_tls_is_refused_in_one_line(service, tmp_path):
    [device] = devices_of([0], tmp_path).values()
    with pytest.raises(PermissionError, match="the server wants it: give --keys"):
        dialler(device, service.hub.port).attend()


def test_a_number_beyond_the_clients_is_refused(tmp_path):
    service = service_of(described(tmp_path, rounds=1))
    service.hub.start()
    [device] = devices_of([3], tmp_path).values()
    with pytest.raises(PermissionError, match="device 3: expected a number below 3"):
        dialler(device, service.hub.port).attend()
    service.hub.close()


def test_whatever_comes_the_server_goes_on(tmp_path):
    experiment = described(tmp_path, "split", rounds=1)
    service = service_of(experiment)
    done = []
    thread = threading.Thread(target=lambda: done.extend(service.rounds(tmp_path / "run")))
    thread.start()
    known = [framed(Hello(0)), framed(Proof(b""))]
    trials = [
        ([b""], "INVALID_ARGUMENT"),
        ([b"\xff" * 50], "INVALID_ARGUMENT"),
        ([framed(Answer(1, 0))], "INVALID_ARGUMENT"),
        ([framed(Hello(0, version=9))], "FAILED_PRECONDITION"),
        ([*known, b"\x00\x00\x00\x00junk"], "INVALID_ARGUMENT"),
        ([*known, framed(Hello(0))], "INVALID_ARGUMENT"),
        ([*known, bytes(40_000_000)], "RESOURCE_EXHAUSTED"),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{service.hub.port}") as channel:
        for frames, code in trials:
            call = channel.stream_stream("/pliant.Split/Work")(iter(frames), wait_for_ready=True)
            with pytest.raises(grpc.RpcError) as refused:
                list(call)
            assert refused.value.code().name == code
    with dialling(devices_of(range(3), tmp_path), service.hub.port, tmp_path):
        thread.join(60)
    assert done[-1].digest == simulated(experiment)[-1].digest


def test_who_says_nothing_is_hung_up_on(tmp_path, monkeypatch):
    monkeypatch.setattr(split_hub, "GREETING", 0.3)
    service = service_of(described(tmp_path, rounds=1))
    service.hub.start()
    silence = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{service.hub.port}") as channel:
        call = channel.stream_stream("/pliant.Split/Work")(iter(silence.wait, True))
        with pytest.raises(grpc.RpcError):
            list(call)
        silence.set()
    service.hub.close()


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Cannot listen"):
            service_of(described(tmp_path), port=taken.getsockname()[1])
