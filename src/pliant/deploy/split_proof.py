"""The proof of a device's key: a signature of the server's nonce and the federation's name."""

import secrets
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PURPOSE = b"pliant split learning 1\x00"
PLAIN = "insecure"  # the name of a federation without keys
_BY = ec.ECDSA(hashes.SHA384())

PublicKeys = dict[int, ec.EllipticCurvePublicKey]


def name_of(ca: Path) -> str:
    """Return the name of a federation: the digest of its authority's certificate."""
    return sha256(ca.read_bytes()).hexdigest()


def nonce() -> bytes:
    """Return bytes that nobody has signed before."""
    return secrets.token_bytes(32)


def registered(keys: Path) -> PublicKeys:
    """Read the public keys of all devices, by their numbers."""
    found: PublicKeys = {}
    for path in sorted((keys / "devices").glob("*/key.pub")):
        if path.parent.name.isdigit():
            key = serialization.load_ssh_public_key(path.read_bytes())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError(f"{path}: expected a key of `pliant deploy init`")
            found[int(path.parent.name)] = key
    return found


def signed(key: Path, nonce: bytes, name: str, device: int) -> bytes:
    """Sign with a device's private key."""
    found = serialization.load_ssh_private_key(key.read_bytes(), None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key}: expected a key of `pliant deploy init`")
    return found.sign(_said(nonce, name, device), _BY)


def is_proved(keys: PublicKeys, signature: bytes, nonce: bytes, name: str, device: int) -> bool:
    """Tell whether a signature is that of the device's registered key."""
    if device not in keys:
        return False
    try:
        keys[device].verify(signature, _said(nonce, name, device), _BY)
    except InvalidSignature:
        return False
    return True


def _said(nonce: bytes, name: str, device: int) -> bytes:
    return PURPOSE + nonce + name.encode() + b"\x00" + str(device).encode()
