"""What a device finds at a server's door: nobody, the wrong one, one that hangs up."""

import logging
import socket
import ssl
import threading
from contextlib import contextmanager

import pytest

from pliant.deploy import door
from pliant.deploy.keys import make_keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_keys(folder, devices=1)
    return folder


@contextmanager
def answering(answer):
    """Listen on loopback and treat every caller alike, until the test is over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return
                with caller:
                    try:
                        answer(caller)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def speaking_tls(keys):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    context.set_alpn_protocols(["h2"])

    def answer(caller):
        caller.settimeout(5)
        with context.wrap_socket(caller, server_side=True) as secure:
            secure.recv(1)

    return answer


def hang_up(caller):
    caller.recv(1_000_000)  # all that was said: what is not read would make it a reset


def reset(caller):
    caller.recv(1)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.parametrize("answer", [hang_up, reset])
@pytest.mark.parametrize("is_secure", [True, False])
def test_a_server_that_is_killed_during_a_knock_is_tried_again(keys, answer, is_secure):
    gone = (ConnectionResetError, ssl.SSLEOFError)  # and no PermissionError, which is final
    with answering(answer) as port, pytest.raises(gone):
        door.knock("127.0.0.1", port, keys / "ca.crt" if is_secure else None)


def test_what_is_not_tls_is_refused(keys):
    def answer(caller):
        caller.recv(1000)
        caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with answering(answer) as port, pytest.raises(PermissionError, match="expected TLS, got none"):
        door.knock("127.0.0.1", port, keys / "ca.crt")


def test_who_comes_without_tls_where_it_is_wanted_is_told(keys):
    with answering(speaking_tls(keys)) as port:
        with pytest.raises(PermissionError, match="the server wants it: give --keys"):
            door.knock("127.0.0.1", port, None)
        assert door.knock("127.0.0.1", port, keys / "ca.crt") == "split"
        assert door.awaited("127.0.0.1", port, keys / "ca.crt") == "split"


def test_another_name_is_told_apart_from_another_authority(keys, tmp_path, monkeypatch):
    make_keys(tmp_path / "others", devices=1)
    connect = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda place, wait: connect(("127.0.0.1", place[1]), wait)
    )
    with answering(speaking_tls(keys)) as port:
        with pytest.raises(PermissionError) as name:
            door.knock("example.org", port, keys / "ca.crt")
        with pytest.raises(PermissionError, match="expected a certificate of the authority in"):
            door.knock("localhost", port, tmp_path / "others" / "ca.crt")
    told = str(name.value)
    assert "the certificate is for localhost, 127.0.0.1, " in told
    assert told.endswith("not for example.org: make keys with --host example.org")


def test_that_nobody_answers_is_said_once(monkeypatch, caplog):
    answers = iter([ConnectionRefusedError(), TimeoutError(), ConnectionResetError(), "split"])

    def knocked(*given):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(door, "_knock", knocked)
    monkeypatch.setattr(door.time, "sleep", lambda seconds: None)
    with caplog.at_level(logging.WARNING):
        assert door.awaited("127.0.0.1", 22100, None) == "split"
    assert caplog.messages == ["nobody answers at 127.0.0.1:22100; trying again"]


@pytest.mark.parametrize(("why", "is_final"), [("EAI_NONAME", True), ("EAI_AGAIN", False)])
def test_a_name_that_nobody_knows_is_refused_and_one_that_may_come_is_not(
    monkeypatch, why, is_final
):
    def knocked(*given):
        raise socket.gaierror(getattr(socket, why), "as the resolver puts it")

    def slept(seconds):
        raise InterruptedError

    monkeypatch.setattr(door, "_knock", knocked)
    monkeypatch.setattr(door.time, "sleep", slept)
    with pytest.raises(ValueError if is_final else InterruptedError):
        door.awaited("nosuch.invalid", 22100, None)


@pytest.mark.parametrize("server", ["127.0.0.1:210500", "127.0.0.1:0", "a..b:9092", "localhost:²"])
def test_an_address_that_cannot_be_is_refused(server):
    with pytest.raises(ValueError, match="Expected --server HOST:PORT"):
        door.need_address(server, None, None)


def test_an_authority_that_is_none_is_refused(keys, tmp_path):
    key = keys / "devices" / "0" / "key"
    with pytest.raises(FileNotFoundError, match=r"ca\.crt: expected the authority"):
        door.need_address("localhost:9092", tmp_path / "ca.crt", key)
    (tmp_path / "ca.crt").write_text("garbage")
    with pytest.raises(ValueError, match=r"ca\.crt: expected a certificate in PEM"):
        door.need_address("localhost:9092", tmp_path / "ca.crt", key)
    assert door.need_address("[::1]:9092", keys / "ca.crt", key) == ("::1", 9092)


def test_other_machines_need_keys_by_the_name_of_the_option():
    with pytest.raises(ValueError, match=r"Expected --keys FOLDER for example\.org"):
        door.need_address("example.org:9092", None, None)
