"""Ask a server before connecting: is it up, is it trusted, what does it serve."""

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from pliant.deploy.security.certificates import LOCAL_HOSTS, check_private_file, parse_host
from pliant.deploy.settings import PORTS
from pliant.deploy.versions import (
    DESCRIBE_CALL,
    DESCRIBE_ROUTE,
    SERVER_HEADER,
    ServerInfo,
    ServerKind,
    find_version_problem,
)

log = logging.getLogger("pliant")

RETRY_SECONDS = 1.0
TIMEOUT_SECONDS = 10.0
_WRONG_TIME = (9, 10)  # OpenSSL's codes for not valid yet, and expired
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
    """Return the kind of run that a server says it serves, over HTTP or gRPC.

    Raise OSError if there is no server or it does not say, and PermissionError if it cannot be
    trusted or speaks another protocol version.
    """
    context = None if ca is None else _check_trust(host, port, ca)
    raw = _ask_http(host, port, context) or _ask_grpc(host, port, ca)
    if raw is None:
        if ca is None and _needs_tls(host, port):
            raise PermissionError(
                f"{host}:{port}: expected no TLS, got a server that requires --keys"
            )
        raise ConnectionResetError(f"{host}:{port} does not say what it serves")
    problem = find_version_problem(raw)
    if problem is not None:
        raise PermissionError(f"{host}:{port}: expected {problem}")
    return msgspec.json.decode(raw, type=ServerInfo).kind


def _check_trust(host: str, port: int, ca: Path) -> ssl.SSLContext:
    """Raise an error if a server is not of this authority; return how to connect to it."""
    context = _make_tls_context(ca)
    try:
        with _connect(host, port, context):
            context.set_alpn_protocols(["http/1.1"])
            return context
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NAME_MISMATCH:
            names = _fetch_certificate_names(host, port, context)
            reason = f"the certificate is for {names}, not for {host}: make keys with --host {host}"
        elif error.verify_code in _WRONG_TIME:
            now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            reason = f"{error.verify_message} by this machine's clock, which says {now}"
        else:
            detail = error.verify_message or "it is not trusted"
            reason = f"expected a certificate of the authority in {ca}, got another ({detail})"
        raise PermissionError(f"{host}:{port}: {reason}") from None
    except ssl.SSLError as error:
        is_closed = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if is_closed or "ALERT" in (error.reason or ""):
            raise  # as a server does that is being stopped
        raise PermissionError(f"{host}:{port}: expected TLS, got none") from None


def _ask_http(host: str, port: int, context: ssl.SSLContext | None) -> str | None:
    if context is None:
        connection = HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    else:
        connection = HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)
    with closing(connection):
        try:
            connection.request("GET", DESCRIBE_ROUTE)
            return connection.getresponse().getheader(SERVER_HEADER)
        except (HTTPException, OSError):
            return None


def _ask_grpc(host: str, port: int, ca: Path | None) -> str | None:
    if find_spec("grpc") is None:
        return None
    grpc: Any = import_module("grpc")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if ca is None:
        channel = grpc.insecure_channel(address, options)
    else:
        credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        call = channel.stream_stream(DESCRIBE_CALL)(iter(()), timeout=TIMEOUT_SECONDS)
        try:
            for _ in call:
                pass  # everything is in the headers
            info: str | None = dict(call.trailing_metadata()).get(SERVER_HEADER)
            return info
        except grpc.RpcError:
            return None


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
