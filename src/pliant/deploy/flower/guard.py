"""Check every request to SuperLink before Flower reads its body.

Flower serves devices, runs and control on one port, reads bodies of any size into memory before it
authenticates the sender, and requires no credentials for control. Here a request must prove by its
headers who sent it: a device by its signature, a run by its task's token, the supervisor by its
secret. Only then is its body read, up to a limit.
"""

import asyncio
import hmac
from base64 import b64decode
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant.deploy.flower.app_bundle import APP_HASH
from pliant.deploy.flower.registered_nodes import RegisteredNodes
from pliant.deploy.security.enrolment import EnrolmentService
from pliant.deploy.security.rate_limit import RateLimit
from pliant.deploy.security.registry import DeviceRegistry
from pliant.deploy.settings import OBJECT_BYTES, WAITS_FOR_APPROVAL, read_byte_limit
from pliant.deploy.versions import (
    DESCRIBE_ROUTE,
    ENROL_HEADER,
    ENROL_ROUTE,
    SERVER_HEADER,
    ServerInfo,
)

FLEET, CONTROL, RUNTIME = "/v1/fleet/", "/v1/control/", "/v1/runtime/"
CONTROL_ROUTES = {f"{CONTROL}{name}" for name in ("start-run", "stop-run")}
OPEN_ROUTES = (f"{FLEET}register-node", f"{FLEET}activate-node")
SERVER_INFO = msgspec.json.encode(ServerInfo("federated")).decode()
ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"
OPEN_BYTES = 64 * 1024  # of a body whose sender has proved nothing
OPEN_SECONDS = 3.0  # for such a body to arrive
BODY_SECONDS = 120.0  # for any other
EXTRA_OBJECTS = 16  # of a reply, besides the chunks of its array
REQUESTS_PER_SECOND, BURST = 20.0, 200.0  # of one device, or of one address without a proof


@dataclass(frozen=True)
class RequestRefused(Exception):
    """A request is answered with this status instead of being passed on."""

    status: int
    reason: str
    headers: dict[str, str] = field(default_factory=dict)


class GuardMiddleware:
    """Refuse requests without a proof of who sent them, and bodies that are too large."""

    def __init__(
        self, app: ASGIApp, *, state: Any, secret: str, reply_limit: Path, keys: Path | None
    ) -> None:
        self.app, self._state, self._secret = app, state, secret
        self._nodes = self._enrolment = None
        if keys is not None:
            registry = DeviceRegistry(keys)
            self._nodes = RegisteredNodes(registry, lambda: state.linkstate_factory.state())
            self._enrolment = EnrolmentService(keys, registry)
        self._reply_limit = reply_limit  # a file that the run writes
        self._rates = RateLimit(REQUESTS_PER_SECOND, BURST)
        self._reply_bytes: dict[str, int] = {}  # of each device's current reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise RequestRefused(404, "expected HTTP")
            if scope["path"] == DESCRIBE_ROUTE:
                raise RequestRefused(200, "pliant")  # nothing of the request is read
            if scope["path"] == ENROL_ROUTE:
                raise RequestRefused(200, "", await self._enrol(scope))
            receive = await self._check(scope, receive)
        except RequestRefused as refusal:
            # the rest of the body is not read, so the connection ends here
            headers = {"connection": "close", "retry-after": "1", SERVER_HEADER: SERVER_INFO}
            headers |= refusal.headers
            response = PlainTextResponse(f"{refusal.reason}\n", refusal.status, headers)
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _enrol(self, scope: Scope) -> dict[str, str]:
        """Return the header that answers a device's enrolment."""
        client, header = scope.get("client"), Headers(scope=scope).get(ENROL_HEADER, "")
        address = str(client and client[0])
        if self._enrolment is None or not self._rates.allow(address):
            raise RequestRefused(404 if self._enrolment is None else 429, "there is nothing here")
        return {ENROL_HEADER: await run_in_threadpool(self._enrolment.answer, header, address)}

    async def _check(self, scope: Scope, receive: Receive) -> Receive:
        """Raise `RequestRefused`, or return what replays the request's body."""
        path, headers = str(scope["path"]), Headers(scope=scope)
        if not path.startswith((FLEET, RUNTIME)) and path not in (*OPEN_ROUTES, *CONTROL_ROUTES):
            raise RequestRefused(404, "there is nothing here")
        peer = await run_in_threadpool(self._find_peer, path, headers)
        client = scope.get("client")
        if peer is None and path not in OPEN_ROUTES:
            raise RequestRefused(401, "expected the credentials of this route")
        is_device = path.startswith(FLEET)
        if (peer is None or is_device) and not self._rates.allow(peer or str(client and client[0])):
            raise RequestRefused(429, f"expected at most {REQUESTS_PER_SECOND:g} requests/s")
        max_bytes = OPEN_BYTES if peer is None else OBJECT_BYTES
        seconds = OPEN_SECONDS if peer is None else BODY_SECONDS
        body = await _read_body(headers, receive, max_bytes, seconds)
        if path == f"{CONTROL}start-run":
            _check_app(body)
        if peer is not None and is_device:
            self._count_reply(path, peer, body)
        return _replay(body, receive)

    def _find_peer(self, path: str, headers: Headers) -> str | None:
        """Return who proves by the headers to have sent a request."""
        if self._nodes is not None:
            self._nodes.update()  # a device that was revoked is no node any more
        try:
            if path.startswith(FLEET):
                return self._find_device(headers)
            if path.startswith(CONTROL):
                given = headers.get("authorization", "").removeprefix("Bearer ")
                is_right = hmac.compare_digest(given.encode(), self._secret.encode())
                return "supervisor" if is_right else None
            if path == f"{RUNTIME}acquire-task":
                return self._find_superexec(headers)
            return self._find_task(headers)
        except (LookupError, ValueError, TypeError, AttributeError):
            return None

    def _find_device(self, headers: Headers) -> str | None:
        """Return a device's public key if Flower knows it and the request is signed with it."""
        from flwr.common.constant import (
            SYSTEM_TIME_TOLERANCE,
            TIMESTAMP_HEADER,
            TIMESTAMP_TOLERANCE,
        )
        from flwr.supercore.constant import (
            FLEET_HTTP_PUBLIC_KEY_HEADER,
            FLEET_HTTP_SIGNATURE_HEADER,
        )
        from flwr.supercore.date import now
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

        encoded, timestamp = headers[FLEET_HTTP_PUBLIC_KEY_HEADER], headers[TIMESTAMP_HEADER]
        key = b64decode(encoded, validate=True)
        is_pending = self._nodes is not None and self._nodes.is_pending(key)
        is_known = self._state.linkstate_factory.state().get_node_id_by_public_key(key)
        if not (is_known or is_pending):
            return None
        age = (now() - datetime.fromisoformat(timestamp)).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        is_valid = verify_signature(bytes_to_public_key(key), timestamp.encode(), signature)
        if is_valid and is_pending:
            raise RequestRefused(503, WAITS_FOR_APPROVAL)
        return encoded if is_valid else None

    def _find_superexec(self, headers: Headers) -> str | None:
        """Check the signature; Flower checks the body and that the nonce is new."""
        from flwr.supercore.auth import superexec
        from flwr.supercore.constant import (
            SUPEREXEC_AUTH_BODY_SHA256_HEADER,
            SUPEREXEC_AUTH_NONCE_HEADER,
            SUPEREXEC_AUTH_SIGNATURE_HEADER,
            SUPEREXEC_AUTH_TIMESTAMP_HEADER,
        )

        expected = superexec.compute_superexec_signature(
            auth_secret=superexec.derive_auth_secret(self._state.superexec_auth_secret),
            method=ACQUIRE_TASK,
            timestamp=int(headers[SUPEREXEC_AUTH_TIMESTAMP_HEADER]),
            nonce=headers[SUPEREXEC_AUTH_NONCE_HEADER],
            body_sha256=headers[SUPEREXEC_AUTH_BODY_SHA256_HEADER],
        )
        is_right = hmac.compare_digest(expected, headers[SUPEREXEC_AUTH_SIGNATURE_HEADER])
        return "superexec" if is_right else None

    def _find_task(self, headers: Headers) -> str | None:
        from flwr.supercore.constant import TASK_TOKEN_HEADER

        token = headers[TASK_TOKEN_HEADER]
        is_known = self._state.linkstate_factory.state().get_task_by_token(token) is not None
        return "run" if is_known else None

    def _count_reply(self, path: str, device: str, body: bytes) -> None:
        """Refuse a reply that is larger than a valid one can be, before it is stored."""
        if path not in (f"{FLEET}push-messages", f"{FLEET}push-object"):
            return
        max_bytes = read_byte_limit(self._reply_limit)
        count = self._reply_bytes.get(device, 0) + len(body)
        if path == f"{FLEET}push-messages":
            from flwr.proto.fleet_pb2 import PushMessagesRequest

            try:
                trees = PushMessagesRequest.FromString(body).message_object_trees
            except Exception:  # not a message: Flower says so
                return
            objects = sum(map(_count_objects, trees))
            if objects > max_bytes // OBJECT_BYTES + EXTRA_OBJECTS:
                raise RequestRefused(413, f"expected a reply of at most {max_bytes} bytes")
            count = len(body)
        self._reply_bytes[device] = count
        if count > max_bytes + OPEN_BYTES:
            raise RequestRefused(413, f"expected a reply of at most {max_bytes} bytes")


def _count_objects(tree: Any) -> int:
    count, trees = 0, [tree]
    while trees:
        node = trees.pop()
        count += 1
        trees.extend(node.children)
    return count


def _check_app(body: bytes) -> None:
    """Refuse to start any app but pliant's."""
    from flwr.proto.control_pb2 import StartRunRequest

    try:
        request = StartRunRequest.FromString(body)
    except Exception:
        raise RequestRefused(400, "expected a request to start a run") from None
    if request.app_spec or sha256(request.fab.content).hexdigest() != APP_HASH:
        raise RequestRefused(403, f"expected pliant's app {APP_HASH[:16]}, got another")


async def _read_body(headers: Headers, receive: Receive, max_bytes: int, seconds: float) -> bytes:
    reason = f"expected a body of at most {max_bytes} bytes"
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > max_bytes:
        raise RequestRefused(413, reason)
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestRefused(400, "the connection ended")
                chunks.append(message.get("body", b""))
                if sum(map(len, chunks)) > max_bytes:  # whatever its length was said to be
                    raise RequestRefused(413, reason)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise RequestRefused(408, f"expected the body within {seconds:g} s") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a body that has been read, and then what else the connection has."""
    is_sent = False

    async def receive_body() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body
