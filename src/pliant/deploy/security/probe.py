"""Ask a server before connecting: is it up, is it trusted, what does it serve."""

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
    host, port = split_address(server)
    check_loopback(host, has_keys=ca is not None and key is not None)
    if ca is not None:
        _make_tls_context(ca)
    if key is not None:
        check_private_file(key)
    return host, port


def split_address(server: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"Expected --server HOST:PORT, got {server!r}")
    if int(port) not in PORTS:
        raise ValueError(f"Expected --server HOST:PORT with a port from 1 to 65535, got {server!r}")
    parse_host(host, "--server HOST:PORT with a host name or an address")
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
    roots = None if ca is None else _check_trust(host, port, ca)
    raw = HeaderCall(DESCRIBE_ROUTE, DESCRIBE_CALL, SERVER_HEADER).send(host, port, roots)
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


def _check_trust(host: str, port: int, ca: Path) -> bytes:
    """Raise an error if a server is not of this authority; return its certificate."""
    context = _make_tls_context(ca)
    try:
        with _connect(host, port, context):
            return ca.read_bytes()
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


@dataclass(frozen=True)
class HeaderCall:
    """A call whose request and answer are one header each, over HTTP or gRPC."""

    route: str  # of HTTP
    method: str  # of gRPC
    header: str
    value: str = ""  # of the request

    def send(
        self, host: str, port: int, roots: bytes | None, *, is_pinned: bool = False
    ) -> str | None:
        """Return the answer of a server that has a certificate of `roots`; None without one.

        A pinned certificate is the server's own, whatever its names.
        """
        answer = self._send_http(host, port, roots, is_pinned)
        return answer or self._send_grpc(host, port, roots, is_pinned)

    def _send_http(self, host: str, port: int, roots: bytes | None, is_pinned: bool) -> str | None:
        if roots is None:
            connection = HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
        else:
            context = ssl.create_default_context(cadata=roots.decode())
            context.set_alpn_protocols(["http/1.1"])
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.check_hostname = not is_pinned
            connection = HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)
        with closing(connection):
            try:
                connection.request("GET", self.route, headers={self.header: self.value})
                return connection.getresponse().getheader(self.header)
            except (HTTPException, OSError):
                return None

    def _send_grpc(self, host: str, port: int, roots: bytes | None, is_pinned: bool) -> str | None:
        if find_spec("grpc") is None:
            return None
        grpc: Any = import_module("grpc")
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options: list[tuple[str, int | str]] = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if is_pinned:
            options.append(("grpc.ssl_target_name_override", LOCAL_HOSTS[0]))
        if roots is None:
            channel = grpc.insecure_channel(address, options)
        else:
            channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(roots), options)
        with channel:
            metadata = [(self.header, self.value)]
            open_stream = channel.stream_stream(self.method)
            call = open_stream(iter(()), timeout=TIMEOUT_SECONDS, metadata=metadata)
            try:
                for _ in call:
                    pass  # everything is in the headers
                answer: str | None = dict(call.trailing_metadata()).get(self.header)
                return answer
            except grpc.RpcError:
                return None


def fetch_certificate(host: str, port: int) -> bytes:
    """Return the certificate that a server shows, of which nothing is known yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with _connect(host, port, context) as secure:
            raw = secure.getpeercert(binary_form=True) or b""
    except ssl.SSLError:
        raise PermissionError(f"{host}:{port}: expected TLS, got none") from None
    except OSError as error:
        raise ConnectionError(f"no server at {host}:{port}: {error}") from None
    return ssl.DER_cert_to_PEM_cert(raw).encode()


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
            f"{ca}: expected the certificate of an authority, found no file"
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
