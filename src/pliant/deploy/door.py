"""Knock at a server's door: is it there, is it the right one, and what does it speak."""

import socket
import ssl
import time
from pathlib import Path
from typing import Literal

from pliant.deploy.keys import need_private
from pliant.deploy.processes import LOOPBACK

Door = Literal["split", "federated"]
AGAIN = 1.0  # seconds between two knocks
PATIENCE = 10.0  # seconds for an answer
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and SETTINGS
_SETTINGS = 4  # the type of the frame that a server of HTTP/2 begins with


def need_address(server: str, ca: Path | None, key: Path | None) -> tuple[str, int]:
    """Return host and port; refuse what is none, and other machines without TLS and key."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ValueError(f"Expected --server HOST:PORT, got {server!r}")
    if (ca is None or key is None) and host not in LOOPBACK:
        raise ValueError(f"Expected --ca and --key for {host}: --insecure is for loopback only")
    if key is not None:
        need_private(key)
    return host, int(port)


def awaited(host: str, port: int, ca: Path | None) -> Door:
    """Knock until somebody is there."""
    while True:
        try:
            return knock(host, port, ca)
        except PermissionError:
            raise
        except OSError:
            time.sleep(AGAIN)


def knock(host: str, port: int, ca: Path | None) -> Door:
    """Tell what a server speaks: gRPC on HTTP/2 for split methods, Flower's HTTP/1.1 for others.

    Nobody there is an OSError; a server that must not be talked to is a PermissionError.
    """
    with socket.create_connection((host, port), PATIENCE) as plain:
        plain.settimeout(PATIENCE)
        if ca is None:
            return _plain(plain, f"{host}:{port}")
        context = ssl.create_default_context(cafile=str(ca))
        context.set_alpn_protocols(["h2", "http/1.1"])
        try:
            with context.wrap_socket(plain, server_hostname=host) as secure:
                return "split" if secure.selected_alpn_protocol() == "h2" else "federated"
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message or "it is not trusted"
            raise PermissionError(
                f"{host}:{port}: expected a certificate of the authority in {ca}, got another "
                f"({why})"
            ) from None
        except (ssl.SSLError, ConnectionResetError):
            raise PermissionError(f"{host}:{port}: expected TLS, got none") from None


def _plain(plain: socket.socket, server: str) -> Door:
    plain.sendall(PREFACE)
    try:
        head = plain.recv(9)
    except ConnectionResetError:
        head = b""
    if head.startswith(b"HTTP/1"):
        return "federated"
    if len(head) == 9 and head[3] == _SETTINGS:
        return "split"
    raise PermissionError(f"{server}: expected no TLS, but the server wants it: give --keys")
