"""Knock at a server's door: is it there, is it the right one, and what does it speak."""

import logging
import socket
import ssl
import time
from pathlib import Path
from typing import Literal

from pliant.deploy.keys import need_host, need_private
from pliant.deploy.processes import LOOPBACK, PORTS

log = logging.getLogger("pliant")

Door = Literal["split", "federated"]
AGAIN = 1.0  # seconds between two knocks
PATIENCE = 10.0  # seconds for an answer
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and SETTINGS
_SETTINGS = 4  # the type of the frame that a server of HTTP/2 begins with
_OTHER_NAME = (62, 64)  # OpenSSL's codes for a certificate of another host, of another address


def need_address(server: str, ca: Path | None, key: Path | None) -> tuple[str, int]:
    """Return host and port; refuse what is none, and other machines without TLS and key."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"Expected --server HOST:PORT, got {server!r}")
    if int(port) not in PORTS:
        raise ValueError(f"Expected --server HOST:PORT with a port from 1 to 65535, got {server!r}")
    need_host(host, "--server HOST:PORT with a host name or an address")
    if (ca is None or key is None) and host not in LOOPBACK:
        raise ValueError(f"Expected --keys FOLDER for {host}: --insecure is for loopback only")
    if ca is not None:
        _trusting(ca)
    if key is not None:
        need_private(key)
    return host, int(port)


def awaited(host: str, port: int, ca: Path | None) -> Door:
    """Knock until somebody is there, and say once that one has to wait."""
    context = None if ca is None else _trusting(ca)
    is_told = False
    while True:
        try:
            return _knock(host, port, ca, context)
        except PermissionError:
            raise
        except OSError as error:
            if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                raise ValueError(
                    f"Expected --server HOST:PORT, got a host that nobody knows: {host!r}"
                ) from None
            if not is_told:
                log.warning("nobody answers at %s:%s; trying again", host, port)
            is_told = True
            time.sleep(AGAIN)


def knock(host: str, port: int, ca: Path | None) -> Door:
    """Tell what a server speaks: gRPC on HTTP/2 for split methods, Flower's HTTP/1.1 for others.

    Nobody there, or somebody who hangs up, is an OSError; a server that must not be talked to is a
    PermissionError.
    """
    return _knock(host, port, ca, None if ca is None else _trusting(ca))


def _knock(host: str, port: int, ca: Path | None, context: ssl.SSLContext | None) -> Door:
    if context is None:
        return _plain(host, port)
    try:
        with (
            socket.create_connection((host, port), PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            return "split" if secure.selected_alpn_protocol() == "h2" else "federated"
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OTHER_NAME:
            names = _names(host, port, context)
            why = f"the certificate is for {names}, not for {host}: make keys with --host {host}"
        else:
            told = error.verify_message or "it is not trusted"
            why = f"expected a certificate of the authority in {ca}, got another ({told})"
        raise PermissionError(f"{host}:{port}: {why}") from None
    except ssl.SSLError as error:
        is_end = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if is_end or "ALERT" in (error.reason or ""):
            raise  # it has hung up, as one that is being ended does
        raise PermissionError(f"{host}:{port}: expected TLS, got none") from None


def _plain(host: str, port: int) -> Door:
    with socket.create_connection((host, port), PATIENCE) as plain:
        plain.sendall(PREFACE)
        try:
            head = plain.recv(9)
        except ConnectionResetError:
            head = b""
    if head.startswith(b"HTTP/1"):
        return "federated"
    if len(head) == 9 and head[3] == _SETTINGS:
        return "split"
    if head or _speaks_tls(host, port):
        raise PermissionError(
            f"{host}:{port}: expected no TLS, but the server wants it: give --keys"
        )
    raise ConnectionResetError(f"{host}:{port} has hung up")


def _speaks_tls(host: str, port: int) -> bool:
    """Tell whether a server wants TLS; it says nothing to those who come without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is said to it
    try:
        with socket.create_connection((host, port), PATIENCE) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def _trusting(ca: Path) -> ssl.SSLContext:
    """Return what trusts one authority only; refuse a file that is none."""
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{ca}: expected the authority of `pliant deploy init`, found no such file"
        ) from None
    except (ssl.SSLError, IsADirectoryError):
        raise ValueError(f"{ca}: expected a certificate in PEM, got something else") from None
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def _names(host: str, port: int, trusting: ssl.SSLContext) -> str:
    """Return whom the certificate of a server is for, which the authority vouches for."""
    trusting.check_hostname = False  # the authority is still checked
    try:
        with (
            socket.create_connection((host, port), PATIENCE) as plain,
            trusting.wrap_socket(plain) as secure,
        ):
            found = secure.getpeercert() or {}
    finally:
        trusting.check_hostname = True
    return ", ".join(str(entry[1]) for entry in found.get("subjectAltName", ())) or "nobody"
