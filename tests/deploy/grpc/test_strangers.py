"""Unwanted callers are refused in one line, and the run continues."""

import socket
import ssl
import threading
from contextlib import suppress

import grpc
import psutil
import pytest
from tests.deploy.federation_keys import make_federation_keys, make_stranger_key
from tests.deploy.grpc_in_process import (
    connect_devices,
    make_client,
    make_devices,
    make_experiment,
    make_server_run,
    open_raw_stream,
    simulate_rounds,
)
from tests.waiting import LIMIT, wait_until

from pliant.deploy.grpc import server
from pliant.deploy.grpc.chunks import MAX_MESSAGE_BYTES
from pliant.deploy.grpc.client import GrpcClient
from pliant.deploy.grpc.frames import Ready, RunFinished
from pliant.deploy.grpc.handshake import (
    FAILURE_BURST,
    NONCE_HEADER,
    NONCE_SECONDS,
    Authenticator,
    StreamHello,
    StreamRefused,
    make_hello,
)
from pliant.deploy.messages import encode_message
from pliant.deploy.security import certificates
from pliant.deploy.security.registry import DeviceRegistry
from pliant.deploy.versions import Versions


def as_one_message(raw):
    """Send something as one message, instead of chunks."""
    return [raw]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_federation_keys(folder, devices=3)
    return folder


@pytest.fixture
def server_run(keys, tmp_path):
    run = make_server_run(make_experiment(tmp_path, rounds=1), keys)
    run.grpc_server.start()
    yield run
    run.grpc_server.close()


def test_an_unregistered_key_is_refused_in_one_line(server_run, keys, tmp_path):
    [device] = make_devices([0], tmp_path).values()
    key = make_stranger_key(keys, tmp_path / "stranger")
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
    make_federation_keys(tmp_path / "others", devices=1)
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
    ready = encode_message(Ready("", 0))
    attempts = [
        ([b""], {}, "INVALID_ARGUMENT"),
        ([b"\xff" * 50], {}, "INVALID_ARGUMENT"),
        ([ready, b"\x00\x00\x00\x00junk"], {}, "INVALID_ARGUMENT"),
        ([encode_message(RunFinished())], {}, "INVALID_ARGUMENT"),
        ([bytes(40_000_000)], {}, "RESOURCE_EXHAUSTED"),
        ([bytes(MAX_MESSAGE_BYTES + 1)], {"split": as_one_message}, "RESOURCE_EXHAUSTED"),
        ([b"\x02junk"], {"split": as_one_message}, "INVALID_ARGUMENT"),
        ([b"\x00"], {"split": as_one_message}, "INVALID_ARGUMENT"),
        ([ready], {"device": 3}, "FAILED_PRECONDITION"),
        ([ready], {"versions": Versions(protocol=3, pliant="0.1")}, "FAILED_PRECONDITION"),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{server_run.grpc_server.port}") as channel:
        for frames, hello, code in attempts:
            call = open_raw_stream(channel, frames, **hello)
            with pytest.raises(grpc.RpcError) as refusal:
                list(call)
            assert refusal.value.code().name == code
        assert "expected protocol 7 of pliant" in refusal.value.details()
        assert refusal.value.details().endswith("got protocol 3 of pliant 0.1")
    with connect_devices(make_devices(range(3), tmp_path), server_run.grpc_server.port, tmp_path):
        thread.join(LIMIT)
    assert records[-1].digest == simulate_rounds(experiment)[-1].digest


def test_streams_of_strangers_keep_no_device_out(tmp_path):
    """Strangers hold neither a thread nor a place, however many streams they open."""
    server_run = make_server_run(make_experiment(tmp_path, rounds=1))
    server_run.grpc_server.start()
    silence, address = threading.Event(), f"127.0.0.1:{server_run.grpc_server.port}"
    with grpc.insecure_channel(address) as channel:
        open_stream = channel.stream_stream("/pliant.Split/Work")
        calls = [open_stream(iter(silence.wait, True), wait_for_ready=True) for _ in range(100)]
        devices = make_devices(range(3), tmp_path)
        with connect_devices(devices, server_run.grpc_server.port, tmp_path):
            for device_channel in server_run.channels.values():
                wait_until(lambda c=device_channel: c.is_ready, "the device to join")
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        silence.set()
    server_run.grpc_server.close()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def test_connections_that_prove_nothing_end_and_take_no_threads(keys, tmp_path, monkeypatch):
    """Some never begin TLS, some never HTTP, some never a call, some send a byte at a time."""
    monkeypatch.setattr(server, "HANDSHAKE_MS", 2000)
    monkeypatch.setattr(server, "IDLE_MS", 2000)
    run = make_server_run(make_experiment(tmp_path, rounds=1), keys)
    run.grpc_server.start()
    port, process = run.grpc_server.port, psutil.Process()
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    context.set_alpn_protocols(["h2"])
    sockets = []
    threads = process.num_threads()
    for index in range(120):
        connection = socket.create_connection(("127.0.0.1", port), LIMIT)
        if index % 4 in (1, 2):
            connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
        if index % 4 == 2:
            connection.sendall(PREFACE)
        if index % 4 == 3:
            connection.sendall(b"\x16")
        sockets.append(connection)
    [device] = make_devices([0], tmp_path).values()
    with connect_devices({0: device}, port, tmp_path, keys):
        wait_until(lambda: run.channels[0].is_ready, "the device to join")
    assert process.num_threads() < threads + 20  # of which the device has some
    for connection in sockets:
        with suppress(ConnectionError, ssl.SSLError):
            while connection.recv(65536):
                pass  # until the server closes it
        connection.close()
    run.grpc_server.close()


def make_authenticator(keys, now):
    name = certificates.read_federation_name(keys / "ca.crt")
    return Authenticator(DeviceRegistry(keys), name, clock=lambda: now[0])


def test_a_proof_is_valid_once_and_for_a_short_time(keys):
    now = [0.0]
    authenticator = make_authenticator(keys, now)

    def prove(device=0, key=0):
        files = keys / "ca.crt", keys / "devices" / str(key) / "key"
        return dict(make_hello(dict(authenticator.describe()), StreamHello(device), *files))

    headers = prove()
    assert authenticator.verify(headers, "here").hello.device == 0
    for wrong in (headers, prove(device=1), {}):
        with pytest.raises(StreamRefused):
            authenticator.verify(wrong, "here")
    late = prove()
    now[0] += NONCE_SECONDS
    with pytest.raises(StreamRefused, match="expected a new nonce"):
        authenticator.verify(late, "here")
    tampered = prove()
    tampered[NONCE_HEADER] = bytes(len(tampered[NONCE_HEADER]))
    with pytest.raises(StreamRefused, match="expected a new nonce"):
        authenticator.verify(tampered, "here")


def test_an_address_that_fails_too_often_is_refused_unheard_and_unlogged(keys):
    now = [0.0]
    authenticator, refusals = make_authenticator(keys, now), []
    for _ in range(1000):
        with pytest.raises(StreamRefused) as refusal:
            authenticator.verify({}, "a stranger")
        refusals.append(refusal.value)
    assert sum(not refusal.is_logged for refusal in refusals) == FAILURE_BURST
    files = keys / "ca.crt", keys / "devices" / "0" / "key"
    hello = make_hello(dict(authenticator.describe()), StreamHello(0), *files)
    assert authenticator.verify(dict(hello), "elsewhere").hello.device == 0
    now[0] += 10.0
    hello = make_hello(dict(authenticator.describe()), StreamHello(0), *files)
    assert authenticator.verify(dict(hello), "a stranger").hello.device == 0


def test_a_port_that_is_taken_is_an_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Cannot listen"):
            make_server_run(make_experiment(tmp_path), port=taken.getsockname()[1])
