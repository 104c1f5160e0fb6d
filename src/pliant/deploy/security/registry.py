"""The devices that a server accepts: their public keys, and the tokens to enrol new ones.

All of it is one file in the server's keys folder. Commands and a running server change it under a
lock, and the server reads it again whenever it has changed. It holds no secret of a device: of a
token it has the SHA-256 only.
"""

import hmac
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from pliant.deploy.security.certificates import (
    PublicKey,
    check_server_keys,
    compute_fingerprint,
    format_public_key,
    parse_public_key,
    read_federation_name,
)
from pliant.storage import atomic, formats
from pliant.storage.run_lock import RunLock

REGISTRY_FILE, REGISTRY_LOCK = "registry.json", "registry.lock"
TOKEN_BYTES = 16
AUTHORITY_DIGITS = 32  # of the federation's name, in a token
LOCK_SECONDS = 30.0  # to wait for others that change the file
MAX_NUMBER = 10**7

RegistrationStatus = Literal["approved", "pending", "invited", "revoked"]


class EnrolmentRefused(PermissionError):
    """A device is not enrolled; says why in one line."""


class IssuedToken(Struct, frozen=True):
    """A token that has not been used."""

    digest: str
    expires: float  # seconds since 1970
    is_rotation: bool = False  # it replaces the key of a device that has one


class RegisteredDevice(Struct, frozen=True):
    """What the server knows of a device."""

    key: str | None = None  # that it accepts
    pending: str | None = None  # that waits for approval
    token: IssuedToken | None = None
    old_keys: tuple[str, ...] = ()  # that were replaced or revoked, and are not accepted again

    @property
    def status(self) -> RegistrationStatus:
        if self.key is not None:
            return "approved"
        if self.pending is not None:
            return "pending"
        return "revoked" if self.token is None else "invited"

    def retire_keys(self, key: str | None) -> "RegisteredDevice":
        """Return the device with another key or none, and without a token."""
        old_keys = [old for old in (self.key, self.pending) if old is not None]
        return RegisteredDevice(key, old_keys=(*self.old_keys, *old_keys))

    @property
    def fingerprint(self) -> str:
        key = self.key or self.pending
        return "" if key is None else compute_fingerprint(key)


class _RegistryFile(Struct, frozen=True):
    devices: dict[int, RegisteredDevice] = {}
    format: int = formats.KEYS.number


class Token(Struct, frozen=True):
    """What a device needs to enrol: its number, a secret, and whom to trust."""

    number: int
    secret: str
    authority: str  # the first digits of the federation's name

    def __str__(self) -> str:
        return f"{self.number}-{self.secret}-{self.authority}"


def parse_token(text: str) -> Token:
    number, _, rest = text.strip().partition("-")
    secret, _, authority = rest.partition("-")
    is_number = number.isascii() and number.isdigit() and int(number) <= MAX_NUMBER
    if not is_number or len(secret) != 2 * TOKEN_BYTES or len(authority) != AUTHORITY_DIGITS:
        raise ValueError("Expected a token of `pliant server devices token`, got another text")
    return Token(int(number), secret, authority)


class DeviceRegistry:
    """The registered devices of the server whose keys are in a folder."""

    def __init__(self, keys: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._keys, self._path, self._clock = keys, keys / REGISTRY_FILE, clock
        self._version: object = None
        self._devices: Mapping[int, RegisteredDevice] = {}
        self._public_keys: dict[int, PublicKey] = {}
        self._parsed: dict[str, PublicKey] = {}  # so that a change costs what has changed

    @property
    def version(self) -> object:
        """Return a value that changes with the file."""
        try:
            fact = self._path.stat()
        except FileNotFoundError:
            return None
        return fact.st_ino, fact.st_mtime_ns, fact.st_size

    def read(self) -> Mapping[int, RegisteredDevice]:
        """Return the devices as they are now."""
        version = self.version
        if version is None:
            return {}
        if version != self._version:
            devices = self._load()
            keys = {number: device.key for number, device in devices.items() if device.key}
            known = self._parsed
            self._parsed = {key: known.get(key) or parse_public_key(key) for key in keys.values()}
            self._public_keys = {number: self._parsed[key] for number, key in keys.items()}
            self._devices, self._version = devices, version
        return self._devices

    def read_public_keys(self) -> Mapping[int, PublicKey]:
        """Return the approved keys as they are now."""
        return self._public_keys if self.read() else {}

    def issue_token(
        self, number: int | None, *, seconds: float, is_rotation: bool = False
    ) -> Token:
        """Return a new token, which replaces an older one of this number.

        Without a number, it is for the first device that never had a key and has no valid token.
        """
        with self._edit() as devices:
            return self._issue(devices, number, seconds, is_rotation=is_rotation)

    def issue_tokens(self, count: int, *, seconds: float) -> list[Token]:
        """Return tokens for the first devices that never had a key and have no valid token."""
        with self._edit() as devices:
            free = (n for n in range(MAX_NUMBER) if self._is_free(devices.get(n)))
            return [self._issue(devices, n, seconds) for n in list(islice(free, count))]

    def _issue(
        self,
        devices: dict[int, RegisteredDevice],
        number: int | None,
        seconds: float,
        *,
        is_rotation: bool = False,
    ) -> Token:
        if number is None:
            number = next(n for n in range(MAX_NUMBER) if self._is_free(devices.get(n)))
        device = devices.get(number, RegisteredDevice())
        if is_rotation and device.key is None:
            raise LookupError(f"device {number}: expected an approved key to replace")
        if not is_rotation and (device.key or device.pending):
            raise ValueError(
                f"device {number}: expected no key, got a device that is {device.status}; "
                "rotate or revoke its key"
            )
        secret, end = token_hex(TOKEN_BYTES), self._clock() + seconds
        devices[number] = replace(device, token=IssuedToken(_hash_secret(secret), end, is_rotation))
        return Token(number, secret, self._authority)

    @cached_property
    def _authority(self) -> str:
        return read_federation_name(self._keys / "ca.crt")[:AUTHORITY_DIGITS]

    def _is_free(self, device: RegisteredDevice | None) -> bool:
        if device is None:
            return True
        is_open = device.token is not None and device.token.expires > self._clock()
        return not (device.key or device.pending or device.old_keys or is_open)

    def enrol(
        self,
        number: int,
        secret: str,
        public_key: PublicKey,
        has_old_key: Callable[[str], bool] = lambda key: False,
    ) -> None:
        """Use a token: let a key wait for approval, or replace the key of its owner.

        `has_old_key` tells whether the sender has proved the key that is to be replaced. To repeat
        an enrolment changes nothing.
        """
        text = format_public_key(public_key)
        with self._edit() as devices:
            device = devices.get(number, RegisteredDevice())
            if text in (device.key, device.pending):
                return
            token = device.token
            if token is None or not hmac.compare_digest(token.digest, _hash_secret(secret)):
                raise EnrolmentRefused(
                    "expected a token that was issued and not used; ask for a new one"
                )
            if token.expires <= self._clock():
                raise EnrolmentRefused("the token has expired; ask for a new one")
            if any(text in (o.key, o.pending, *o.old_keys) for o in devices.values()):
                raise EnrolmentRefused("expected a new key, got one that is registered")
            if not token.is_rotation:
                devices[number] = replace(device, pending=text, token=None)
            elif device.key is None or not has_old_key(device.key):
                raise EnrolmentRefused("expected a proof of the key that is to be replaced")
            else:
                devices[number] = device.retire_keys(text)

    def approve(self, *numbers: int) -> list[RegisteredDevice]:
        """Accept the keys that devices have enrolled: all of them, or none after an error."""
        with self._edit() as devices:
            for number in numbers:
                device = devices.get(number, RegisteredDevice())
                if device.pending is None:
                    raise LookupError(f"device {number}: expected a key that waits for approval")
                devices[number] = replace(device, key=device.pending, pending=None)
            return [devices[number] for number in numbers]

    def revoke(self, number: int) -> None:
        """Refuse a device from its next message on; its tokens become invalid too."""
        with self._edit() as devices:
            device = devices.get(number, RegisteredDevice())
            if device.status == "revoked":
                raise LookupError(f"device {number}: expected a device with a key or a token")
            devices[number] = device.retire_keys(None)

    @contextmanager
    def _edit(self) -> Iterator[dict[int, RegisteredDevice]]:
        """Change the devices; write nothing if there is an error."""
        check_server_keys(self._keys)
        lock = self._lock()
        try:
            devices = dict(self._load())
            yield devices
            raw = msgspec.json.encode(_RegistryFile(dict(sorted(devices.items()))))
            atomic.write_bytes(self._path, raw, is_private=True)
        finally:
            lock.release()

    def _lock(self) -> RunLock:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return RunLock(self._keys, REGISTRY_LOCK)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def _load(self) -> dict[int, RegisteredDevice]:
        if not self._path.exists():
            return {}
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=_RegistryFile)
        except msgspec.DecodeError as error:
            raise ValueError(f"{self._path}: expected registered devices, got {error}") from None
        formats.KEYS.check(content.format, self._path)
        return content.devices


def _hash_secret(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
