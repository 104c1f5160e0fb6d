"""The keys of a federation: certificate authority, server certificate, one key per device.

A device proves that it has its key by signing the server's nonce and the federation's name.
"""

import ipaddress
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pliant.storage import formats

PrivateKey = ec.EllipticCurvePrivateKey
PublicKeys = dict[int, ec.EllipticCurvePublicKey]
PEM = serialization.Encoding.PEM
CURVE = ec.SECP384R1()
AUTHORITY_NAME = "pliant authority"
VALID_YEARS = 5
SIGNATURE_CONTEXT = b"pliant split learning 1\x00"
SIGNATURE_ALGORITHM = ec.ECDSA(hashes.SHA384())
INSECURE_FEDERATION = "insecure"  # the name of a federation without keys
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
    own_names = filter(_HOST_NAME.fullmatch, [socket.gethostname()])
    names = [
        parse_host(host, "--host with a host name or an address")
        for host in dict.fromkeys((*LOCAL_HOSTS, *own_names, *hosts))
    ]
    if devices < 1:
        raise ValueError(f"Expected one device or more, got {devices}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose a new folder for the keys")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # owner only
    try:
        paths = _write_keys(draft, devices, names)
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return [folder / path.relative_to(draft) for path in paths]


def _write_keys(folder: Path, devices: int, hosts: Sequence[x509.GeneralName]) -> list[Path]:
    authority_key, server_key = (ec.generate_private_key(CURVE) for _ in range(2))
    authority = _make_certificate(AUTHORITY_NAME, authority_key, authority_key)
    server = _make_certificate("pliant server", server_key, authority_key, hosts)
    pkcs8 = serialization.PrivateFormat.PKCS8
    paths = [
        _write_file(folder / "ca.crt", authority.public_bytes(PEM)),
        _write_file(folder / "ca.key", _encode_key(authority_key, pkcs8), is_secret=True),
        _write_file(folder / "server.pem", server.public_bytes(PEM)),
        _write_file(folder / "server.key", _encode_key(server_key, pkcs8), is_secret=True),
    ]
    for number in range(devices):
        paths += make_device_key(folder / "devices" / str(number))
    return paths


def make_device_key(folder: Path) -> list[Path]:
    """Make the key pair of one device in OpenSSH format, which Flower requires."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(CURVE)
    private = _encode_key(key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return [
        _write_file(folder / "key", private, is_secret=True),
        _write_file(folder / "key.pub", public),
        _write_file(folder / FORMAT_FILE, b"%d\n" % formats.KEYS.number),
    ]


def parse_host(host: str, expected: str) -> x509.GeneralName:
    """Return a host name or an address; raise ValueError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(f"Expected {expected}, got {host!r}") from None
        return x509.DNSName(host)


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
    if not key.parent.is_dir():
        raise FileNotFoundError(
            f"{keys} has no device {number}; it has {_format_numbers(_list_devices(keys))}"
        )
    _check_format(keys, number)
    _check_file(key)
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


def check_private_file(path: Path) -> None:
    """Raise an error if a secret is missing or readable by other users."""
    _check_file(path)
    if os.name != "nt" and path.stat().st_mode & 0o077:
        raise PermissionError(
            f"{path}: expected a file that only its owner can read; run `chmod 600 {path}`"
        )


def _make_certificate(
    name: str, key: PrivateKey, authority_key: PrivateKey, hosts: Sequence[x509.GeneralName] = ()
) -> x509.Certificate:
    now, signer = datetime.now(UTC), authority_key.public_key()
    is_authority = key is authority_key
    builder = (
        x509.CertificateBuilder()
        .subject_name(_make_name(name))
        .issuer_name(_make_name(AUTHORITY_NAME))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=365 * VALID_YEARS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .add_extension(_make_key_usage(is_authority), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return builder.sign(authority_key, hashes.SHA384())


def _make_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


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


def _encode_key(key: PrivateKey, key_format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(PEM, key_format, serialization.NoEncryption())


def _write_file(path: Path, raw: bytes, *, is_secret: bool = False) -> Path:
    path.touch(0o600 if is_secret else 0o666, exist_ok=False)
    path.write_bytes(raw)
    return path


def read_federation_name(ca: Path) -> str:
    """Return the federation's name: the digest of its authority's certificate."""
    return sha256(ca.read_bytes()).hexdigest()


def read_public_keys(folder: Path) -> PublicKeys:
    public_keys: PublicKeys = {}
    for number in _list_devices(folder):
        path = folder / "devices" / str(number) / "key.pub"
        key = serialization.load_ssh_public_key(path.read_bytes())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError(f"{path}: expected a key of `pliant deploy init`")
        public_keys[number] = key
    return public_keys


def sign_challenge(key_path: Path, nonce: bytes, federation_name: str, device: int) -> bytes:
    key = serialization.load_ssh_private_key(key_path.read_bytes(), None)
    if not isinstance(key, PrivateKey):
        raise ValueError(f"{key_path}: expected a key of `pliant deploy init`")
    return key.sign(_build_signed_message(nonce, federation_name, device), SIGNATURE_ALGORITHM)


def is_signature_valid(
    public_keys: PublicKeys, signature: bytes, nonce: bytes, federation_name: str, device: int
) -> bool:
    """Return whether a signature was made with the device's registered key."""
    if device not in public_keys:
        return False
    try:
        public_keys[device].verify(
            signature, _build_signed_message(nonce, federation_name, device), SIGNATURE_ALGORITHM
        )
    except InvalidSignature:
        return False
    return True


def _build_signed_message(nonce: bytes, federation_name: str, device: int) -> bytes:
    return SIGNATURE_CONTEXT + nonce + federation_name.encode() + b"\x00" + str(device).encode()
