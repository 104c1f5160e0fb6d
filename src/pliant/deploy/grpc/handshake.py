"""Prove a device's key before its stream is opened, in the headers of two calls.

The server answers the first call with a nonce, and the second one carries the device's signature
of it. Neither call holds a thread or reads a message of a stranger, so strangers cannot keep
devices out. Importing this does not load torch.
"""

import hmac
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from pliant.deploy.security import certificates
from pliant.deploy.security.certificates import PublicKey
from pliant.deploy.security.rate_limit import RateLimit
from pliant.deploy.security.registry import DeviceRegistry
from pliant.deploy.settings import WAITS_FOR_APPROVAL
from pliant.deploy.versions import (
    SERVER_HEADER,
    ServerInfo,
    ServerKind,
    Versions,
    find_version_problem,
)

GRPC_SERVICE, GRPC_METHOD = "pliant.Split", "Work"
KEEPALIVE_MS = 20_000  # between pings on a silent connection
PING_TIMEOUT_MS = 60_000  # the longest that a stream outlives its peer
HELLO_HEADER = "pliant-hello"
NONCE_HEADER, SIGNATURE_HEADER = "pliant-nonce-bin", "pliant-signature-bin"
NONCE_BYTES, MAC_BYTES = 16, 16
NONCE_SECONDS = 30.0  # in which a nonce must be used
FAILURES_PER_SECOND, FAILURE_BURST = 2.0, 30.0  # of one address, before it is refused unheard
_EXPIRY = struct.Struct("<d")


class StreamHello(Struct, frozen=True):
    """A device names itself and its process, which stays the same after a broken stream."""

    device: int
    process: str = ""
    versions: Versions = Versions()


class ProvedHello(NamedTuple):
    """A device's hello, and the key that it has proved; None without keys."""

    hello: StreamHello
    key: PublicKey | None


@dataclass
class StreamRefused(Exception):
    """A stream is refused for a reason."""

    code: str
    reason: str
    is_logged: bool = False  # the log has this refusal already


@dataclass
class Authenticator:
    """Issue nonces, and verify the devices that sign them."""

    registry: DeviceRegistry | None  # None: anyone is believed
    federation: str
    kind: ServerKind = "split"  # of this server
    clock: Callable[[], float] = time.monotonic
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _used: dict[bytes, float] = field(default_factory=dict)  # nonces, until they expire
    _waiting: set[int] = field(default_factory=set)  # devices whose missing approval is logged

    def __post_init__(self) -> None:
        self._failures = RateLimit(FAILURES_PER_SECOND, FAILURE_BURST, self.clock)

    def describe(self) -> list[tuple[str, str | bytes]]:
        """Return the headers that answer a device's first call."""
        info = ServerInfo(self.kind, self.federation)
        raw = secrets.token_bytes(NONCE_BYTES) + _EXPIRY.pack(self.clock() + NONCE_SECONDS)
        return [
            (SERVER_HEADER, msgspec.json.encode(info).decode()),
            (NONCE_HEADER, raw + self._authenticate_nonce(raw)),
        ]

    def verify(self, headers: Mapping[str, str | bytes], address: str) -> ProvedHello:
        """Return the hello and the key that a device proves; raise `StreamRefused`."""
        if not self._failures.check(address):
            raise StreamRefused("RESOURCE_EXHAUSTED", "expected fewer attempts", is_logged=True)
        try:
            return self._verify(headers)
        except StreamRefused as refusal:
            if not self._failures.allow(address):
                refusal.is_logged = True
            raise

    def find_revocation(self, device: int, key: PublicKey | None) -> StreamRefused | None:
        """Return why a key that was proved is not accepted any more, if so."""
        if self.registry is None:
            return None
        current, name = self.registry.read_public_keys().get(device), f"device {device}"
        if current is None:
            return StreamRefused("UNAUTHENTICATED", f"{name}: expected a registered key")
        if current != key:
            return StreamRefused("UNAVAILABLE", f"{name}: expected its new key, got the old one")
        return None

    def _verify(self, headers: Mapping[str, str | bytes]) -> ProvedHello:
        try:
            hello = msgspec.json.decode(headers[HELLO_HEADER], type=StreamHello)
        except (KeyError, msgspec.DecodeError) as error:
            other = find_version_problem(headers.get(HELLO_HEADER, "{}")) or f"a hello: {error}"
            raise StreamRefused("FAILED_PRECONDITION", f"expected {other}") from None
        name = f"device {hello.device}"
        problem = find_version_problem(headers[HELLO_HEADER])
        if problem is not None:
            raise StreamRefused("FAILED_PRECONDITION", f"{name}: expected {problem}")
        nonce, signature = headers.get(NONCE_HEADER), headers.get(SIGNATURE_HEADER)
        if not isinstance(nonce, bytes) or not self._is_nonce_fresh(nonce):
            raise StreamRefused("UNAVAILABLE", f"{name}: expected a new nonce")
        key = self._find_signer(hello.device, nonce, signature)
        self._used = {used: end for used, end in self._used.items() if end > self.clock()}
        self._used[nonce] = self.clock() + NONCE_SECONDS
        return ProvedHello(hello, key)

    def _find_signer(self, number: int, nonce: bytes, signature: object) -> PublicKey | None:
        """Return the registered key that signed a nonce; raise `StreamRefused` if none did."""
        if self.registry is None:
            return None
        message = certificates.build_challenge(nonce, self.federation, number)
        key, name = self.registry.read_public_keys().get(number), f"device {number}"
        if certificates.is_signature_valid(key, signature, message):
            self._waiting.discard(number)
            return key
        device = self.registry.read().get(number)
        pending = None if device is None else device.pending
        if pending is not None and certificates.is_signature_valid(
            certificates.parse_public_key(pending), signature, message
        ):
            is_logged = number in self._waiting
            self._waiting.add(number)
            raise StreamRefused("UNAVAILABLE", f"{name}: {WAITS_FOR_APPROVAL}", is_logged=is_logged)
        raise StreamRefused("UNAUTHENTICATED", f"{name}: expected a registered key")

    def _is_nonce_fresh(self, nonce: bytes) -> bool:
        raw, mac = nonce[:-MAC_BYTES], nonce[-MAC_BYTES:]
        if len(raw) != NONCE_BYTES + _EXPIRY.size or nonce in self._used:
            return False
        is_ours = hmac.compare_digest(mac, self._authenticate_nonce(raw))
        return is_ours and _EXPIRY.unpack(raw[NONCE_BYTES:])[0] > self.clock()

    def _authenticate_nonce(self, raw: bytes) -> bytes:
        return hmac.new(self._secret, raw, sha256).digest()[:MAC_BYTES]


def make_hello(
    headers: Mapping[str, str | bytes], hello: StreamHello, ca: Path | None, key: Path | None
) -> list[tuple[str, str | bytes]]:
    """Return the headers of a device's stream: its hello, and its signature of the nonce.

    Raise ValueError with one line if the server is incompatible or of another federation.
    """
    try:
        info = msgspec.json.decode(headers[SERVER_HEADER], type=ServerInfo)
        nonce = bytes(headers[NONCE_HEADER])  # type: ignore[arg-type] # as its name says
    except (KeyError, TypeError, msgspec.DecodeError):
        problem = find_version_problem(headers.get(SERVER_HEADER, "{}"))
        raise ValueError(f"expected {problem or 'a server that speaks gRPC'}") from None
    problem = find_version_problem(headers[SERVER_HEADER])
    if problem is not None:
        raise ValueError(f"expected {problem}")
    signature = b""
    if ca is not None and key is not None:
        federation = certificates.read_federation_name(ca)
        if info.federation != federation:
            is_insecure = info.federation == certificates.INSECURE_FEDERATION
            other = "one without keys" if is_insecure else "another"
            raise ValueError(f"expected the federation of {ca}, got {other}")
        message = certificates.build_challenge(nonce, federation, hello.device)
        signature = certificates.sign(key, message)
    return [
        (HELLO_HEADER, msgspec.json.encode(hello).decode()),
        (NONCE_HEADER, nonce),
        (SIGNATURE_HEADER, signature),
    ]
