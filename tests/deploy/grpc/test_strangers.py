"""Unwanted callers are refused in one line, and the run continues."""

import socket
import threading

import grpc
import pytest
from tests.deploy.grpc_in_process import (
    connect_devices,
    make_client,
    make_devices,
    make_experiment,
    make_server_run,
    simulate_rounds,
)
from tests.waiting import LIMIT

from pliant.deploy.grpc import server
from pliant.deploy.grpc.client import GrpcClient
from pliant.deploy.grpc.frames import Hello, Proof, SplitReply
from pliant.deploy.messages import encode_message
from pliant.deploy.security.certificates import make_device_key, make_keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_keys(folder, devices=3)
    return folder


@pytest.fixture
def server_run(keys, tmp_path):
    run = make_server_run(make_experiment(tmp_path, rounds=1), keys)
    run.grpc_server.start()
    yield run
    run.grpc_server.close()


def test_an_unregistered_key_is_refused_in_one_line(server_run, keys, tmp_path):
    [device] = make_devices([0], tmp_path).values()
    key = make_device_key(tmp_path / "stranger")[0]
    address = f"127.0.0.1:{server_run.grpc_server.port}"
    files = {"ca": keys / "ca.crt", "key": key}
    client = GrpcClient(device, address, process="one", **files)
    with pytest.raises(PermissionError, match=r"device 0: expected a registered key$"):
        client.run()
    [unknown] = make_devices([7], tmp_path).values()
    client = GrpcClient(unknown, address, process="two", **files)
    with pytest.raises(PermissionError, match=r"device 7: expected a registered key$"):
        client.run()


def test_a_device_of_another_authority_disconnects_in_one_line(server_run, tmp_path):
    make_keys(tmp_path / "others", devices=1)
    [device] = make_devices([0], tmp_path).values()
    with pytest.raises(PermissionError, match="expected a certificate of the authority in"):
        make_client(device, server_run.grpc_server.port, tmp_path / "others").run()


def test_a_device_without_tls_is_refused_in_one_line(server_run, tmp_path):
    [device] = make_devices([0], tmp_path).values()
    with pytest.raises(PermissionError, match="got a server that requires --keys"):
        make_client(device, server_run.grpc_server.port).run()


def test_a_number_beyond_the_clients_is_refused(tmp_path):
    server_run = make_server_run(make_experiment(tmp_path, rounds=1))
    server_run.grpc_server.start()
    [device] = make_devices([3], tmp_path).values()
    with pytest.raises(PermissionError, match="device 3: expected a number below 3"):
        make_client(device, server_run.grpc_server.port).run()
    server_run.grpc_server.close()


def test_the_run_continues_whatever_a_stranger_sends(tmp_path):
    experiment = make_experiment(tmp_path, "split", rounds=1)
    server_run = make_server_run(experiment)
    records = []
    thread = threading.Thread(
        target=lambda: records.extend(server_run.run_rounds(tmp_path / "run"))
    )
    thread.start()
    handshake = [encode_message(Hello(0)), encode_message(Proof(b""))]
    attempts = [
        ([b""], "INVALID_ARGUMENT"),
        ([b"\xff" * 50], "INVALID_ARGUMENT"),
        ([encode_message(SplitReply(1, 0))], "INVALID_ARGUMENT"),
        ([encode_message(Hello(0, version=9))], "FAILED_PRECONDITION"),
        ([*handshake, b"\x00\x00\x00\x00junk"], "INVALID_ARGUMENT"),
        ([*handshake, encode_message(Hello(0))], "INVALID_ARGUMENT"),
        ([*handshake, bytes(40_000_000)], "RESOURCE_EXHAUSTED"),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{server_run.grpc_server.port}") as channel:
        for frames, code in attempts:
            call = channel.stream_stream("/pliant.Split/Work")(iter(frames), wait_for_ready=True)
            with pytest.raises(grpc.RpcError) as refusal:
                list(call)
            assert refusal.value.code().name == code
    with connect_devices(make_devices(range(3), tmp_path), server_run.grpc_server.port, tmp_path):
        thread.join(LIMIT)
    assert records[-1].digest == simulate_rounds(experiment)[-1].digest


def test_a_silent_stranger_is_disconnected(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.3)
    server_run = make_server_run(make_experiment(tmp_path, rounds=1))
    server_run.grpc_server.start()
    silence = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{server_run.grpc_server.port}") as channel:
        call = channel.stream_stream("/pliant.Split/Work")(iter(silence.wait, True))
        with pytest.raises(grpc.RpcError):
            list(call)
        silence.set()
    server_run.grpc_server.close()


def test_a_port_that_is_taken_is_an_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Cannot listen"):
            make_server_run(make_experiment(tmp_path), port=taken.getsockname()[1])
