"""The keys of a federation: certificate authority, server certificate, one key per device."""

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

from pliant.storage import formats

CURVE = ec.SECP384R1()
VALID_YEARS = 5
FORMAT_FILE = "format"  # beside each device's key
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
# The last label is no number, so 300.1.1.1 is neither an address nor a name.
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$)(?:{_HOST_LABEL}\.)*(?!\d+$){_HOST_LABEL}")


def make_keys(folder: Path, *, devices: int, hosts: Sequence[str] = ()) -> list[Path]:
    """Write all keys of a federation into a new folder and return the files.

    Secrets are readable by their owner only. A device needs `ca.crt` and its own folder. The server
    certificate is valid for this machine's own names and for `hosts`.
    """
    for host in hosts:
        check_host(host, "--host with a host name or an address")
    if devices < 1:
        raise ValueError(f"Expected one device or more, got {devices}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose a new folder for the keys")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # owner only
    try:
        names = tuple(dict.fromkeys((*LOCAL_HOSTS, *_find_own_name(), *hosts)))
        paths = _write_keys(draft, devices, names)
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return [folder / path.relative_to(draft) for path in paths]


def _write_keys(folder: Path, devices: int, hosts: Sequence[str]) -> list[Path]:
    authority_key = ec.generate_private_key(CURVE)
    authority = _make_certificate("pliant authority", authority_key, None, authority_key, ())
    server_key = ec.generate_private_key(CURVE)
    server = _make_certificate("pliant server", server_key, authority, authority_key, hosts)
    paths = [
        _write_public(folder / "ca.crt", authority.public_bytes(serialization.Encoding.PEM)),
        _write_secret(folder / "ca.key", _encode_pem(authority_key)),
        _write_public(folder / "server.pem", server.public_bytes(serialization.Encoding.PEM)),
        _write_secret(folder / "server.key", _encode_pem(server_key)),
        _write_secret(folder / "superexec.secret", secrets.token_hex(32).encode()),
    ]
    for number in range(devices):
        paths += make_device_key(folder / "devices" / str(number))
    return paths


def make_device_key(folder: Path) -> list[Path]:
    """Make the key pair of one device in OpenSSH format, which Flower requires."""
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
    return [
        _write_secret(folder / "key", private),
        _write_public(folder / "key.pub", public),
        _write_public(folder / FORMAT_FILE, b"%d\n" % formats.KEYS.number),
    ]


def check_host(host: str, expected: str) -> None:
    """Raise ValueError if this is neither a host name nor an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(f"Expected {expected}, got {host!r}") from None


def check_fleet_keys(keys: Path, size: int) -> None:
    """Raise an error if a folder lacks the keys of any device in the fleet."""
    devices = _list_devices(keys)
    if not devices.issuperset(range(size)):
        numbers = _format_numbers(devices)
        raise ValueError(f"{keys}: expected keys for {size} devices (`fleet.size`), got {numbers}")
    for number in devices:
        _check_format(keys, number)
    public_keys = [f"devices/{number}/key.pub" for number in sorted(devices)]
    for name in ("ca.crt", "server.pem", *public_keys):
        _check_file(keys / name)


def find_device_files(keys: Path, number: int) -> tuple[Path, Path]:
    """Return the paths of the authority's certificate and of a device's key."""
    key = keys / "devices" / str(number) / "key"
    if key.parent.is_dir():
        _check_format(keys, number)
    if not key.is_file():
        raise FileNotFoundError(
            f"{keys} has no device {number}; it has {_format_numbers(_list_devices(keys))}"
        )
    return keys / "ca.crt", key


def _check_format(keys: Path, device: int) -> None:
    path = keys / "devices" / str(device) / FORMAT_FILE
    text = path.read_text().strip() if path.is_file() else ""
    formats.KEYS.check(int(text) if text.isdigit() else None, keys)


def _list_devices(keys: Path) -> set[int]:
    folder = keys / "devices"
    if not folder.is_dir():
        raise FileNotFoundError(f"{keys}: expected the keys of `pliant deploy init`, found none")
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if not (name.isascii() and name.isdigit())]
    if others:
        raise ValueError(f"{folder}: expected folders 0, 1, 2 and so on, got {others[0]!r}")
    return {int(name) for name in names}


def _format_numbers(numbers: set[int]) -> str:
    """Format numbers as a range or a list.

    >>> from pliant.deploy.security.certificates import _format_numbers
    >>> _format_numbers({0, 1, 2}), _format_numbers({1, 4}), _format_numbers(set())
    ('0 to 2', '1, 4', 'none')
    """
    if len(numbers) > 2 and numbers == set(range(min(numbers), max(numbers) + 1)):
        return f"{min(numbers)} to {max(numbers)}"
    return ", ".join(map(str, sorted(numbers))) or "none"


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected this file of `pliant deploy init`, found none")


def _find_own_name() -> tuple[str, ...]:
    name = socket.gethostname()
    return (name,) if _HOST_NAME.fullmatch(name) else ()


def check_private_file(path: Path) -> None:
    """Raise an error if a secret is missing or readable by other users."""
    _check_file(path)
    if os.name != "nt" and path.stat().st_mode & 0o077:
        raise PermissionError(
            f"{path}: expected a file that only its owner can read; run `chmod 600 {path}`"
        )


def _make_certificate(
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
        .not_valid_after(now + timedelta(days=365 * VALID_YEARS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(_make_key_usage(is_authority), critical=True)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_make_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _make_key_usage(is_authority: bool) -> x509.KeyUsage:
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


def _make_general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _encode_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_secret(path: Path, raw: bytes) -> Path:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(raw)
    return path


def _write_public(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path
