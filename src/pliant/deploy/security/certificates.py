"""The keys of a federation: the server's authority and certificate, and each device's own key.

A device makes its key itself, and proves that it has it by signing the server's nonce and the
federation's name.
"""

import ipaddress
import os
import re
import shutil
import socket
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import Struct

from pliant.storage import atomic, formats

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
PEM = serialization.Encoding.PEM
CURVE = ec.SECP384R1()
AUTHORITY_NAME = "pliant authority"
VALID_YEARS = 5
SIGNATURE_CONTEXT = b"pliant split learning 1\x00"
SIGNATURE_ALGORITHM = ec.ECDSA(hashes.SHA384())
INSECURE_FEDERATION = "insecure"  # the name of a federation without keys
FORMAT_FILE = "format"  # in the server's folder
DEVICE_FILE = "device.json"  # in a device's folder
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
# The last label is no number, so 300.1.1.1 is neither an address nor a name.
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$)(?:{_HOST_LABEL}\.)*(?!\d+$){_HOST_LABEL}")


class DeviceIdentity(Struct, frozen=True):
    """Which device of a federation the key in a folder belongs to."""

    number: int
    format: int = formats.KEYS.number


def make_keys(folder: Path, *, hosts: Sequence[str] = ()) -> list[Path]:
    """Write an authority and a server certificate into a new folder and return the files.

    Secrets are readable by their owner only. The certificate is valid for this machine's own names
    and for `hosts`.
    """
    own_names = filter(_HOST_NAME.fullmatch, [socket.gethostname()])
    names = [
        parse_host(host, "--host with a host name or an address")
        for host in dict.fromkeys((*LOCAL_HOSTS, *own_names, *hosts))
    ]
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose a new folder for the keys")
    with draft_folder(folder) as draft:
        paths = _write_keys(draft, names)
    return [folder / path.relative_to(draft) for path in paths]


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder that only its owner can read, and that appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield draft
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_keys(folder: Path, hosts: Sequence[x509.GeneralName]) -> list[Path]:
    authority_key, server_key = (ec.generate_private_key(CURVE) for _ in range(2))
    authority = _make_certificate(AUTHORITY_NAME, authority_key, authority_key)
    server = _make_certificate("pliant server", server_key, authority_key, hosts)
    pkcs8 = serialization.PrivateFormat.PKCS8
    return [
        _write_file(folder / "ca.crt", authority.public_bytes(PEM)),
        _write_file(folder / "ca.key", _encode_key(authority_key, pkcs8), is_secret=True),
        _write_file(folder / "server.pem", server.public_bytes(PEM)),
        _write_file(folder / "server.key", _encode_key(server_key, pkcs8), is_secret=True),
        _write_file(folder / FORMAT_FILE, b"%d\n" % formats.KEYS.number),
    ]


def make_device_key() -> tuple[bytes, str]:
    """Return a new private key and its public key in OpenSSH format, which Flower requires."""
    key = ec.generate_private_key(CURVE)
    return _encode_key(key, serialization.PrivateFormat.OpenSSH), format_public_key(
        key.public_key()
    )


def write_device_folder(folder: Path, ca: bytes, private_key: bytes, number: int) -> None:
    """Write what a device needs to connect: its key, its number and the authority to trust."""
    atomic.write_bytes(folder / "ca.crt", ca)
    atomic.write_bytes(folder / "key", private_key, is_private=True)
    atomic.write_bytes(folder / DEVICE_FILE, msgspec.json.encode(DeviceIdentity(number)))


def format_public_key(key: PublicKey) -> str:
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_bytes(*openssh).decode()


def parse_public_key(text: str) -> PublicKey:
    """Return the key of a text in OpenSSH format; raise ValueError if it is of another kind."""
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, PublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("expected a public key of the curve P-384")
    return key


def compute_fingerprint(public_key: str) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -l` prints it."""
    digest = sha256(b64decode(public_key.split()[1])).digest()
    return "SHA256:" + b64encode(digest).decode().rstrip("=")


def parse_host(host: str, expected: str) -> x509.GeneralName:
    """Return a host name or an address; raise ValueError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(f"Expected {expected}, got {host!r}") from None
        return x509.DNSName(host)


def check_server_keys(keys: Path) -> None:
    """Raise an error if a folder lacks the server's keys, or has those of an older pliant."""
    if not (keys / "ca.crt").is_file():
        raise FileNotFoundError(f"{keys}: expected the keys of `pliant deploy init`, found none")
    path = keys / FORMAT_FILE
    text = path.read_text().strip() if path.is_file() else ""
    formats.KEYS.check(int(text) if text.isdigit() else None, keys)
    _check_file(keys / "server.pem")
    check_private_file(keys / "server.key")


def find_device_files(folder: Path) -> tuple[Path, Path, int]:
    """Return the authority's certificate, the key and the number in a device's folder."""
    path = folder / DEVICE_FILE
    if not path.is_file():
        if (folder / "devices").is_dir():
            formats.KEYS.check(None, folder)
        raise FileNotFoundError(f"{folder}: expected the keys of `pliant device enrol`, found none")
    try:
        identity = msgspec.json.decode(path.read_bytes(), type=DeviceIdentity)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: expected a number and a format, got others: {error}") from None
    formats.KEYS.check(identity.format, folder)
    check_private_file(folder / "key")
    return folder / "ca.crt", folder / "key", identity.number


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected this file of the keys, found none")


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


def sign(key_path: Path, message: bytes) -> bytes:
    """Return a device's signature of a message."""
    return sign_with(key_path.read_bytes(), message, str(key_path))


def sign_with(private_key: bytes, message: bytes, name: str = "key") -> bytes:
    key = serialization.load_ssh_private_key(private_key, None)
    if not isinstance(key, PrivateKey):
        raise ValueError(f"{name}: expected a key of `pliant device enrol`")
    return key.sign(message, SIGNATURE_ALGORITHM)


def is_signature_valid(key: PublicKey | None, signature: object, message: bytes) -> bool:
    """Return whether a signature of a message was made with a key."""
    if key is None or not isinstance(signature, bytes):
        return False
    try:
        key.verify(signature, message, SIGNATURE_ALGORITHM)
    except InvalidSignature:
        return False
    return True


def build_challenge(nonce: bytes, federation_name: str, device: int) -> bytes:
    """Return the message that a device signs to prove its key."""
    return SIGNATURE_CONTEXT + nonce + federation_name.encode() + b"\x00" + str(device).encode()
