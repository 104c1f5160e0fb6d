"""Probing a server that is missing, wrong, or closes the connection."""

import logging
import socket
import ssl
import threading
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec
import pytest
from tests.deploy.federation_keys import make_federation_keys
from tests.waiting import LIMIT

from pliant.deploy.grpc.server import GrpcServer
from pliant.deploy.security import certificates, probe
from pliant.deploy.versions import SERVER_HEADER, ServerInfo, Versions

FEDERATED = msgspec.json.encode(ServerInfo("federated")).decode()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_federation_keys(folder, devices=1)
    return folder


@contextmanager
def serve_connections(handle):
    """Listen on loopback and handle every connection alike until the test is over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        handle(connection)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(LIMIT)


def answer(connection, info):
    connection.settimeout(LIMIT)
    connection.recv(1000)
    header = f"{SERVER_HEADER}: {info}\r\n" if info else ""
    connection.sendall(f"HTTP/1.1 200 OK\r\n{header}Content-Length: 0\r\n\r\n".encode())


def make_tls_handler(keys, info=FEDERATED):
    """Serve HTTP as a proxy does that prefers HTTP/2."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    context.set_alpn_protocols(["h2", "http/1.1"])

    def handle(connection):
        with context.wrap_socket(connection, server_side=True) as secure:
            answer(secure, info)

    return handle


@contextmanager
def serve_grpc(keys=None):
    server = GrpcServer({}, address="127.0.0.1:0", keys=keys, max_message_bytes=1000)
    server.start()
    yield server.port
    server.close()


def close(connection):
    connection.recv(1_000_000)  # closing with unread data would reset the connection


def reset(connection):
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.parametrize("handle", [close, reset])
@pytest.mark.parametrize("is_secure", [True, False])
def test_a_server_that_is_killed_during_a_probe_is_tried_again(keys, handle, is_secure):
    errors = (ConnectionResetError, ssl.SSLEOFError)  # not PermissionError, which is final
    with serve_connections(handle) as port, pytest.raises(errors):
        probe.detect_protocol("127.0.0.1", port, keys / "ca.crt" if is_secure else None)


def test_a_server_without_tls_is_refused(keys):
    def handle(connection):
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    expected = pytest.raises(PermissionError, match="expected TLS, got none")
    with serve_connections(handle) as port, expected:
        probe.detect_protocol("127.0.0.1", port, keys / "ca.crt")


def test_a_device_without_tls_learns_that_the_server_requires_it(keys):
    with serve_connections(make_tls_handler(keys)) as port:
        with pytest.raises(PermissionError, match="got a server that requires --keys"):
            probe.detect_protocol("127.0.0.1", port, None)
        assert probe.detect_protocol("127.0.0.1", port, keys / "ca.crt") == "federated"
        assert probe.wait_for_server("127.0.0.1", port, keys / "ca.crt") == "federated"


def test_the_server_says_what_it_serves_with_and_without_tls(keys):
    with serve_grpc(keys) as port:
        assert probe.detect_protocol("127.0.0.1", port, keys / "ca.crt") == "split"
        with pytest.raises(PermissionError, match="got a server that requires --keys"):
            probe.detect_protocol("127.0.0.1", port, None)
    with serve_grpc() as port:
        assert probe.detect_protocol("127.0.0.1", port, None) == "split"
    with serve_connections(lambda connection: answer(connection, FEDERATED)) as port:
        assert probe.detect_protocol("127.0.0.1", port, None) == "federated"


def test_a_server_that_does_not_say_is_no_server(keys):
    with (
        serve_connections(make_tls_handler(keys, "")) as port,
        pytest.raises(ConnectionResetError, match="does not say what it serves"),
    ):
        probe.detect_protocol("127.0.0.1", port, keys / "ca.crt")


def test_a_server_of_another_version_is_named_in_one_line():
    info = ServerInfo("federated", versions=Versions(protocol=9, pliant="3.0"))
    raw = msgspec.json.encode(info).decode()
    with (
        serve_connections(lambda connection: answer(connection, raw)) as port,
        pytest.raises(PermissionError, match=r"got protocol 9 of pliant 3\.0$"),
    ):
        probe.detect_protocol("127.0.0.1", port, None)


def test_a_wrong_clock_is_named_as_the_cause(tmp_path, monkeypatch):
    class Future(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=2)

    monkeypatch.setattr(certificates, "datetime", Future)
    make_federation_keys(tmp_path / "keys", devices=1)
    with (
        serve_connections(make_tls_handler(tmp_path / "keys")) as port,
        pytest.raises(PermissionError, match="not yet valid by this machine's clock"),
    ):
        probe.detect_protocol("127.0.0.1", port, tmp_path / "keys" / "ca.crt")


def test_a_wrong_host_name_and_a_wrong_authority_have_different_errors(keys, tmp_path, monkeypatch):
    make_federation_keys(tmp_path / "others", devices=1)
    connect = socket.create_connection
    monkeypatch.setattr(
        socket,
        "create_connection",
        lambda address, timeout: connect(("127.0.0.1", address[1]), timeout),
    )
    with serve_connections(make_tls_handler(keys)) as port:
        with pytest.raises(PermissionError) as raised:
            probe.detect_protocol("example.org", port, keys / "ca.crt")
        with pytest.raises(PermissionError, match="expected a certificate of the authority in"):
            probe.detect_protocol("localhost", port, tmp_path / "others" / "ca.crt")
    message = str(raised.value)
    assert "the certificate is for localhost, 127.0.0.1, " in message
    assert message.endswith("not for example.org: make keys with --host example.org")


def test_a_missing_server_is_logged_once(monkeypatch, caplog):
    results = iter([ConnectionRefusedError(), TimeoutError(), ConnectionResetError(), "split"])

    def detect(*arguments):
        result = next(results)
        if isinstance(result, OSError):
            raise result
        return result

    monkeypatch.setattr(probe, "detect_protocol", detect)
    monkeypatch.setattr(probe.time, "sleep", lambda seconds: None)
    with caplog.at_level(logging.WARNING):
        assert probe.wait_for_server("127.0.0.1", 22100, None) == "split"
    assert caplog.messages == ["no server at 127.0.0.1:22100; retrying"]


@pytest.mark.parametrize(("code", "is_final"), [("EAI_NONAME", True), ("EAI_AGAIN", False)])
def test_an_unknown_host_is_refused_unless_the_resolver_says_try_again(monkeypatch, code, is_final):
    def fail(*arguments):
        raise socket.gaierror(getattr(socket, code), "message of the resolver")

    def interrupt(seconds):
        raise InterruptedError

    monkeypatch.setattr(probe, "detect_protocol", fail)
    monkeypatch.setattr(probe.time, "sleep", interrupt)
    with pytest.raises(ValueError if is_final else InterruptedError):
        probe.wait_for_server("nosuch.invalid", 22100, None)


@pytest.mark.parametrize("server", ["127.0.0.1:210500", "127.0.0.1:0", "a..b:9092", "localhost:²"])
def test_an_impossible_address_is_refused(server):
    with pytest.raises(ValueError, match="Expected --server HOST:PORT"):
        probe.parse_server_address(server, None, None)


def test_a_missing_or_invalid_authority_is_refused(keys, tmp_path):
    key = keys / "devices" / "0" / "key"
    with pytest.raises(FileNotFoundError, match=r"ca\.crt: expected the certificate of"):
        probe.parse_server_address("localhost:9092", tmp_path / "ca.crt", key)
    (tmp_path / "ca.crt").write_text("garbage")
    with pytest.raises(ValueError, match=r"ca\.crt: expected a certificate in PEM"):
        probe.parse_server_address("localhost:9092", tmp_path / "ca.crt", key)
    assert probe.parse_server_address("[::1]:9092", keys / "ca.crt", key) == ("::1", 9092)


def test_the_error_for_a_remote_host_without_keys_names_the_option():
    with pytest.raises(ValueError, match=r"Expected --keys FOLDER for example\.org"):
        probe.parse_server_address("example.org:9092", None, None)
