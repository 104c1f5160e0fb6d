"""Probe a server before connecting: is it up, is it trusted, which protocol does it speak."""

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pliant.deploy.security.certificates import LOCAL_HOSTS, check_private_file, parse_host
from pliant.deploy.settings import PORTS

log = logging.getLogger("pliant")

ServerKind = Literal["split", "federated"]
RETRY_SECONDS = 1.0
TIMEOUT_SECONDS = 10.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and SETTINGS
_SETTINGS_FRAME = 4  # the type of the first frame of an HTTP/2 server
_NAME_MISMATCH = (62, 64)  # OpenSSL's codes for a wrong host name and a wrong address


def parse_server_address(server: str, ca: Path | None, key: Path | None) -> tuple[str, int]:
    """Return host and port; raise an error for remote hosts without TLS and key."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"Expected --server HOST:PORT, got {server!r}")
    if int(port) not in PORTS:
        raise ValueError(f"Expected --server HOST:PORT with a port from 1 to 65535, got {server!r}")
    parse_host(host, "--server HOST:PORT with a host name or an address")
    check_loopback(host, has_keys=ca is not None and key is not None)
    if ca is not None:
        _make_tls_context(ca)
    if key is not None:
        check_private_file(key)
    return host, int(port)


def check_loopback(host: str, *, has_keys: bool) -> None:
    """Require keys for all but this machine."""
    if not has_keys and host not in LOCAL_HOSTS:
        raise ValueError(f"Expected --keys FOLDER for {host}: --insecure is for loopback only")


def wait_for_server(host: str, port: int, ca: Path | None) -> ServerKind:
    """Probe until a server answers; log once that it is missing."""
    is_logged = False
    while True:
        try:
            return detect_protocol(host, port, ca)
        except PermissionError:
            raise
        except OSError as error:
            if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                raise ValueError(
                    f"Expected --server HOST:PORT, got an unknown host: {host!r}"
                ) from None
            if not is_logged:
                log.warning("no server at %s:%s; retrying", host, port)
            is_logged = True
            time.sleep(RETRY_SECONDS)


def detect_protocol(host: str, port: int, ca: Path | None) -> ServerKind:
    """Return a server's kind: split if it speaks HTTP/2 (gRPC), federated if HTTP/1.1 (Flower).

    Raise OSError if there is no server or it closes the connection, and PermissionError if it
    cannot be trusted.
    """
    if ca is None:
        return _detect_without_tls(host, port)
    context = _make_tls_context(ca)
    try:
        with _connect(host, port, context) as secure:
            return "split" if secure.selected_alpn_protocol() == "h2" else "federated"
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NAME_MISMATCH:
            names = _fetch_certificate_names(host, port, context)
            reason = f"the certificate is for {names}, not for {host}: make keys with --host {host}"
        else:
            detail = error.verify_message or "it is not trusted"
            reason = f"expected a certificate of the authority in {ca}, got another ({detail})"
        raise PermissionError(f"{host}:{port}: {reason}") from None
    except ssl.SSLError as error:
        is_closed = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if is_closed or "ALERT" in (error.reason or ""):
            raise  # as a server does that is being stopped
        raise PermissionError(f"{host}:{port}: expected TLS, got none") from None


def _detect_without_tls(host: str, port: int) -> ServerKind:
    with socket.create_connection((host, port), TIMEOUT_SECONDS) as plain:
        plain.sendall(PREFACE)
        try:
            header = plain.recv(9)
        except ConnectionResetError:
            header = b""
    if header.startswith(b"HTTP/1"):
        return "federated"
    if len(header) == 9 and header[3] == _SETTINGS_FRAME:
        return "split"
    if header or _needs_tls(host, port):
        raise PermissionError(f"{host}:{port}: expected no TLS, got a server that requires --keys")
    raise ConnectionResetError(f"{host}:{port} closed the connection")


def _needs_tls(host: str, port: int) -> bool:
    """Return whether a server speaks TLS; without TLS it sends nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent
    try:
        with _connect(host, port, context):
            return True
    except OSError:
        return False


@contextmanager
def _connect(host: str, port: int, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection((host, port), TIMEOUT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        yield secure


def _make_tls_context(ca: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts only one authority."""
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{ca}: expected the authority of `pliant deploy init`, found no file"
        ) from None
    except (ssl.SSLError, IsADirectoryError):
        raise ValueError(f"{ca}: expected a certificate in PEM, got something else") from None
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def _fetch_certificate_names(host: str, port: int, context: ssl.SSLContext) -> str:
    context.check_hostname = False  # the authority is still verified
    with _connect(host, port, context) as secure:
        certificate = secure.getpeercert() or {}
    return ", ".join(str(entry[1]) for entry in certificate.get("subjectAltName", ())) or "no host"
