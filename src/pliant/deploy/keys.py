"""The keys of a federation: a certificate authority, the server's certificate, a key a device."""

import ipaddress
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CURVE = ec.SECP384R1()
YEARS = 5
LOCAL = ("localhost", "127.0.0.1", "::1")
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"(?=.{{1,253}}$)(?:{_LABEL}\.)*(?!\d+$){_LABEL}")  # 300.1.1.1 is no name


def make_keys(folder: Path, *, devices: int, hosts: Sequence[str] = ()) -> list[Path]:
    """Write everything that a federation needs into a new folder and return the files.

    Secrets can be read by their owner only. A device needs `ca.crt` and its own folder. The server
    may be called by this machine's own names, and by those in `hosts`.
    """
    for host in hosts:
        need_host(host, "--host with a host name or an address")
    if devices < 1:
        raise ValueError(f"Expected one device or more, got {devices}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose a new folder for the keys")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # owner only
    try:
        made = _made(draft, devices, tuple(dict.fromkeys((*LOCAL, *_own_name(), *hosts))))
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return [folder / path.relative_to(draft) for path in made]


def _made(folder: Path, devices: int, hosts: Sequence[str]) -> list[Path]:
    authority_key = ec.generate_private_key(CURVE)
    authority = _certificate("pliant authority", authority_key, None, authority_key, ())
    server_key = ec.generate_private_key(CURVE)
    server = _certificate("pliant server", server_key, authority, authority_key, hosts)
    made = [
        _written(folder / "ca.crt", authority.public_bytes(serialization.Encoding.PEM)),
        _secret(folder / "ca.key", _pem(authority_key)),
        _written(folder / "server.pem", server.public_bytes(serialization.Encoding.PEM)),
        _secret(folder / "server.key", _pem(server_key)),
        _secret(folder / "superexec.secret", secrets.token_hex(32).encode()),
    ]
    for number in range(devices):
        made += device_key(folder / "devices" / str(number))
    return made


def device_key(folder: Path) -> list[Path]:
    """Make the key of one device, in OpenSSH's form as Flower wants it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(CURVE)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return [_secret(folder / "key", private), _written(folder / "key.pub", public)]


def need_host(host: str, wanted: str) -> None:
    """Refuse what is neither a host name nor an address; `wanted` says where it was given."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host):
            raise ValueError(f"Expected {wanted}, got {host!r}") from None


def need_fleet(keys: Path, size: int) -> None:
    """Refuse a folder of keys that does not have one for each of a fleet's devices."""
    known = _numbers(keys)
    if not known.issuperset(range(size)):
        raise ValueError(
            f"{keys}: expected keys for {size} devices (`fleet.size`), got {_told(known)}"
        )
    publics = [f"devices/{number}/key.pub" for number in sorted(known)]
    for name in ("ca.crt", "server.pem", *publics):
        _need_file(keys / name)


def device_files(keys: Path, number: int) -> tuple[Path, Path]:
    """Return a device's authority and key; say which devices there are if it is none of them."""
    key = keys / "devices" / str(number) / "key"
    if not key.is_file():
        raise FileNotFoundError(f"{keys} has no device {number}; it has {_told(_numbers(keys))}")
    return keys / "ca.crt", key


def _numbers(keys: Path) -> set[int]:
    folder = keys / "devices"
    if not folder.is_dir():
        raise FileNotFoundError(f"{keys}: expected the keys of `pliant deploy init`, found none")
    names = sorted(path.name for path in folder.iterdir())
    odd = [name for name in names if not (name.isascii() and name.isdigit())]
    if odd:
        raise ValueError(f"{folder}: expected folders 0, 1, 2 and so on, got {odd[0]!r}")
    return {int(name) for name in names}


def _told(numbers: set[int]) -> str:
    """Return numbers as one reads them.

    >>> from pliant.deploy.keys import _told
    >>> _told({0, 1, 2}), _told({1, 4}), _told(set())
    ('0 to 2', '1, 4', 'none')
    """
    if len(numbers) > 2 and numbers == set(range(min(numbers), max(numbers) + 1)):
        return f"{min(numbers)} to {max(numbers)}"
    return ", ".join(map(str, sorted(numbers))) or "none"


def _need_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected this file of `pliant deploy init`, found none")


def _own_name() -> tuple[str, ...]:
    name = socket.gethostname()
    return (name,) if _NAME.fullmatch(name) else ()


def need_private(path: Path) -> None:
    """Refuse a secret that is not there, or that others on this machine can read."""
    _need_file(path)
    if os.name != "nt" and path.stat().st_mode & 0o077:
        raise PermissionError(f"{path}: expected a file for its owner only; run `chmod 600 {path}`")


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    is_authority = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(_usage(is_authority), critical=True)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _secret(path: Path, raw: bytes) -> Path:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(raw)
    return path


def _written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path
