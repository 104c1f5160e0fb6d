"""The keys of a federation: a certificate authority, the server's certificate, a key a device."""

import ipaddress
import os
import secrets
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


def make_keys(folder: Path, *, devices: int, hosts: Sequence[str] = ()) -> list[Path]:
    """Write everything that a federation needs into a new folder and return the files.

    Secrets can be read by their owner only. A device needs `ca.crt` and its own folder.
    """
    if devices < 1:
        raise ValueError(f"Expected one device or more, got {devices}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose a new folder for the keys")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority_key = ec.generate_private_key(CURVE)
    authority = _certificate("pliant authority", authority_key, None, authority_key, ())
    server_key = ec.generate_private_key(CURVE)
    server = _certificate("pliant server", server_key, authority, authority_key, (*LOCAL, *hosts))
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


def need_private(path: Path) -> None:
    """Refuse a secret that others on this machine can read."""
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
