"""Enrol a device: it makes a key, and sends the public half with a token that is valid once.

Everything is in the headers of one call, over HTTP or gRPC, so that the server reads no body of a
stranger. A token names the authority: the device asks the server for its certificate first, and
sends nothing before that is the one of the token.
"""

import shutil
import threading
from base64 import b64decode, b64encode
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec import Struct

from pliant.deploy.security.certificates import (
    compute_fingerprint,
    draft_folder,
    find_device_files,
    is_signature_valid,
    make_device_key,
    parse_public_key,
    read_federation_name,
    sign_with,
    write_device_folder,
)
from pliant.deploy.security.probe import HeaderCall, detect_protocol, fetch_certificate
from pliant.deploy.security.rate_limit import RateLimit
from pliant.deploy.security.registry import DeviceRegistry, EnrolmentRefused, Token
from pliant.deploy.versions import (
    ENROL_CALL,
    ENROL_HEADER,
    ENROL_ROUTE,
    Versions,
    find_version_problem,
)

FAILURES_PER_SECOND, FAILURE_BURST = 0.1, 20.0  # of one address, behind which many may be
MAX_REQUEST_CHARS = 4096
ATTEMPTS = 3  # to send a request
LOCAL_SECONDS = 60.0  # in which a token is used on the same machine
SIGNATURE_CONTEXT = b"pliant enrolment 1\x00"


class EnrolmentRequest(Struct, frozen=True):
    """A device's public key and its token, signed with the key and, to replace one, the old key."""

    number: int
    secret: str
    public_key: str
    signature: str  # base64
    old_signature: str = ""
    versions: Versions = Versions()

    def build_message(self, federation: str) -> bytes:
        """Return what the signatures cover."""
        fields = (federation, str(self.number), self.secret, self.public_key)
        return SIGNATURE_CONTEXT + "\x00".join(fields).encode()


class EnrolmentReply(Struct, frozen=True):
    """The server's answer; to a call without a request, its authority's certificate."""

    reason: str = ""  # of a refusal
    ca: str = ""


class EnrolmentService:
    """Answer the enrolment calls to a server, for either transport."""

    def __init__(self, keys: Path, registry: DeviceRegistry) -> None:
        self._registry = registry
        self._ca = (keys / "ca.crt").read_text()
        self._federation = read_federation_name(keys / "ca.crt")
        self._failures, self._lock = RateLimit(FAILURES_PER_SECOND, FAILURE_BURST), threading.Lock()

    def answer(self, header: str, address: str) -> str:
        """Return the header of the answer to a call from an address.

        An address that fails too often is refused. Those who have a token never do, so that as many
        devices as have one can enrol from one address.
        """
        reply = EnrolmentReply(ca=self._ca)
        if header:
            with self._lock:
                is_allowed = self._failures.check(address)
            try:
                if len(header) > MAX_REQUEST_CHARS:
                    raise EnrolmentRefused(f"expected at most {MAX_REQUEST_CHARS} characters")
                if not is_allowed:
                    raise EnrolmentRefused("expected fewer attempts; try again in a minute")
                self._enrol(header)
                reply = EnrolmentReply()
            except (EnrolmentRefused, ValueError) as refusal:
                with self._lock:
                    self._failures.allow(address)
                reply = EnrolmentReply(reason=str(refusal))
        return msgspec.json.encode(reply).decode()

    def _enrol(self, header: str) -> None:
        problem = find_version_problem(header)
        if problem is not None:
            raise EnrolmentRefused(f"expected {problem}")
        try:
            request = msgspec.json.decode(header, type=EnrolmentRequest)
            signature, old = b64decode(request.signature), b64decode(request.old_signature)
        except (msgspec.DecodeError, ValueError):
            raise EnrolmentRefused("expected an enrolment, got something else") from None
        key, message = parse_public_key(request.public_key), request.build_message(self._federation)
        if not is_signature_valid(key, signature, message):
            raise EnrolmentRefused("expected a signature by the key that is enrolled")

        def has_old_key(text: str) -> bool:
            return is_signature_valid(parse_public_key(text), old, message)

        self._registry.enrol(request.number, request.secret, key, has_old_key)


def make_request(
    token: Token, federation: str, private_key: bytes, public_key: str, old_key: bytes | None = None
) -> EnrolmentRequest:
    """Return the signed request of a device with a new key."""
    request = EnrolmentRequest(token.number, token.secret, public_key, "")
    message = request.build_message(federation)
    signatures = [
        "" if key is None else b64encode(sign_with(key, message)).decode()
        for key in (private_key, old_key)
    ]
    return msgspec.structs.replace(request, signature=signatures[0], old_signature=signatures[1])


def enrol_device(host: str, port: int, token: Token, folder: Path) -> str:
    """Make a key, enrol it with a server and write it to a folder; return its fingerprint.

    The folder must be new, or hold the key of the same device, which is replaced.
    """
    old_key = _read_old_key(folder, token.number)
    ca, (private_key, public_key) = _fetch_authority(host, port, token), make_device_key()
    federation = sha256(ca).hexdigest()
    request = make_request(token, federation, private_key, public_key, old_key)
    # write it first, so that no key is registered and then lost
    draft_path = folder if old_key is None else folder / "new"
    if old_key is not None:
        shutil.rmtree(draft_path, ignore_errors=True)
    with draft_folder(draft_path) as draft:
        write_device_folder(draft, ca, private_key, token.number)
        detect_protocol(host, port, draft / "ca.crt")  # raises if it is not to be trusted
        _send_request(host, port, ca, request)
    if old_key is not None:
        (draft_path / "key").replace(folder / "key")
        shutil.rmtree(draft_path)
    return compute_fingerprint(public_key)


def enrol_local_device(keys: Path, number: int, folder: Path) -> None:
    """Enrol a device on the server's own machine, and approve it."""
    registry = DeviceRegistry(keys)
    token = registry.issue_token(number, seconds=LOCAL_SECONDS)
    private_key, public_key = make_device_key()
    ca = (keys / "ca.crt").read_bytes()
    with draft_folder(folder) as draft:
        write_device_folder(draft, ca, private_key, token.number)
        registry.enrol(token.number, token.secret, parse_public_key(public_key))
        registry.approve(token.number)


def _read_old_key(folder: Path, number: int) -> bytes | None:
    if not folder.exists() or not any(folder.iterdir()):
        return None
    _, key, old_number = find_device_files(folder)
    if old_number != number:
        raise FileExistsError(
            f"{folder} has the key of device {old_number}, and the token is for device {number}: "
            "choose another folder"
        )
    return key.read_bytes()


def _fetch_authority(host: str, port: int, token: Token) -> bytes:
    """Return the certificate of the server's authority, if it is the one of the token."""
    name = f"{host}:{port}"
    reply = _call(host, port, fetch_certificate(host, port), "", is_pinned=True)
    if not sha256(reply.ca.encode()).hexdigest().startswith(token.authority):
        raise PermissionError(f"{name}: expected the authority of the token, got another")
    return reply.ca.encode()


def _send_request(host: str, port: int, ca: bytes, request: EnrolmentRequest) -> None:
    header = msgspec.json.encode(request).decode()
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            reply = _call(host, port, ca, header)
        except ConnectionError:  # the server may have enrolled the key: a repetition does no harm
            if not attempts_left:
                raise
        else:
            break
    if reply.reason:
        raise EnrolmentRefused(f"{host}:{port}: {reply.reason}")


def _call(
    host: str, port: int, roots: bytes, header: str, *, is_pinned: bool = False
) -> EnrolmentReply:
    call = HeaderCall(ENROL_ROUTE, ENROL_CALL, ENROL_HEADER, header)
    raw = call.send(host, port, roots, is_pinned=is_pinned)
    if raw is None:
        raise ConnectionResetError(f"{host}:{port}: expected a pliant server that enrols devices")
    return msgspec.json.decode(raw, type=EnrolmentReply)
