"""Challenge and response: a device signs the server's nonce and the federation's name."""

from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

SIGNATURE_CONTEXT = b"pliant split learning 1\x00"
INSECURE_FEDERATION = "insecure"  # the name of a federation without keys
_SIGNATURE_ALGORITHM = ec.ECDSA(hashes.SHA384())

PublicKeys = dict[int, ec.EllipticCurvePublicKey]


def read_federation_name(ca: Path) -> str:
    """Return the federation's name: the digest of its authority's certificate."""
    return sha256(ca.read_bytes()).hexdigest()


def read_public_keys(folder: Path) -> PublicKeys:
    public_keys: PublicKeys = {}
    for path in sorted((folder / "devices").glob("*/key.pub")):
        if path.parent.name.isdigit():
            key = serialization.load_ssh_public_key(path.read_bytes())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError(f"{path}: expected a key of `pliant deploy init`")
            public_keys[int(path.parent.name)] = key
    return public_keys


def sign_challenge(key_path: Path, nonce: bytes, federation_name: str, device: int) -> bytes:
    key = serialization.load_ssh_private_key(key_path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key_path}: expected a key of `pliant deploy init`")
    return key.sign(_build_signed_message(nonce, federation_name, device), _SIGNATURE_ALGORITHM)


def is_signature_valid(
    public_keys: PublicKeys, signature: bytes, nonce: bytes, federation_name: str, device: int
) -> bool:
    """Return whether a signature was made with the device's registered key."""
    if device not in public_keys:
        return False
    try:
        public_keys[device].verify(
            signature, _build_signed_message(nonce, federation_name, device), _SIGNATURE_ALGORITHM
        )
    except InvalidSignature:
        return False
    return True


def _build_signed_message(nonce: bytes, federation_name: str, device: int) -> bytes:
    return SIGNATURE_CONTEXT + nonce + federation_name.encode() + b"\x00" + str(device).encode()
