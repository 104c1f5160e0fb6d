"""A device's connection to SuperLink: it fetches messages for the worker and sends its replies.

Flower's own SuperNode runs the code that the server sends. This one runs none: it answers only
pliant's app, passes each message to the worker, and reads nothing that is larger than a valid
message. It runs as `python -m pliant.deploy.flower.node SETUP`, without torch.
"""

import logging
import signal
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from pliant.deploy.device.heartbeat import Heartbeat
from pliant.deploy.device.host import DeviceSetup
from pliant.deploy.device.worker_call import call_worker
from pliant.deploy.flower.app_bundle import APP_HASH
from pliant.deploy.flower.client_app import extract_body, make_content
from pliant.deploy.flower.limited_transport import LimitedTransport
from pliant.deploy.security.probe import detect_protocol
from pliant.deploy.settings import (
    ARRIVAL_HEADER,
    BYTE_LIMIT_FILE,
    OBJECT_BYTES,
    WAITS_FOR_APPROVAL,
    ServerChanged,
    ServerRefusal,
    read_byte_limit,
    run_process,
)

log = logging.getLogger("pliant")

POLL_SECONDS = 1.0
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # the delay doubles in between
ADMISSION_SECONDS = 180.0  # in which a server must accept a device
REFUSALS_BEFORE_WARNING = 3  # a server that has just started may not know the keys yet
REFUSED_MESSAGE = "expected a registered key that no other process uses; the server refused it"
APPROVAL_RETRY_SECONDS = 1.0
MAX_SKEW_SECONDS = 5.0  # that Flower accepts in the time of a request
HEARTBEAT_SECONDS = 10  # Flower's shortest; a dead node counts as online for twice as long
OBJECT_SECONDS = 120.0  # for the server to receive all of a message
EXTRA_OBJECTS = 16  # of a message, besides the chunks of its array


class MessageRefused(Exception):
    """A message that this device does not pass on; says what was expected."""


class FleetNode:
    """Keep a device connected to a SuperLink until it is stopped or refused."""

    def __init__(self, setup: DeviceSetup, call_worker: Callable[[bytes, float], bytes]) -> None:
        self._setup, self._call_worker = setup, call_worker
        self._key_file = None if setup.key is None else Path(setup.key).read_bytes()
        private, public = (
            generate_key_pairs() if self._key_file is None else _load_key(self._key_file)
        )
        self._public_key = public_key_to_bytes(public)
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, public),
        ]
        self.client = FleetHttpClient.from_server_address(
            setup.server, setup.ca is None, setup.ca, interceptors
        )
        verify: bool | ssl.SSLContext = (
            True if setup.ca is None else ssl.create_default_context(cafile=setup.ca)
        )
        self.client._client = httpx.Client(
            transport=LimitedTransport(verify=verify), timeout=30.0, trust_env=False
        )
        self._node: Any = None
        self._changed_to = ""  # the kind of run that the server serves now, if another
        self._runs: dict[int, str] = {}  # the app of each run
        self._byte_limit = Path(setup.folder) / BYTE_LIMIT_FILE

    def run(self) -> None:
        """Pass messages to the worker; raise `ServerRefusal` if the server refuses this device."""
        while True:
            self._node = Node(node_id=self._activate())
            log.info("device %s joined", self._setup.device)
            stop = threading.Event()
            threading.Thread(target=self._send_heartbeats, args=(stop,), daemon=True).start()
            try:
                self._handle_messages()
            finally:
                stop.set()

    def leave(self) -> None:
        """Tell the server that this device goes."""
        with suppress(Exception):
            if self._node is not None:
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def _activate(self) -> int:
        refused_since, refusals, delay, is_logged = 0.0, 0, FIRST_RETRY_SECONDS, False
        name = f"device {self._setup.device}"
        while True:
            try:
                if self._key_file is None:
                    request = RegisterNodeFleetRequest(public_key=self._public_key)
                    self.client.RegisterNode(request)
                response = self.client.ActivateNode(
                    ActivateNodeRequest(
                        public_key=self._public_key, heartbeat_interval=HEARTBEAT_SECONDS
                    )
                )
                return int(response.node_id)
            except httpx.HTTPStatusError as error:
                if error.response.text.strip() == WAITS_FOR_APPROVAL:
                    if not is_logged:
                        log.warning("%s: %s; retrying", name, WAITS_FOR_APPROVAL)
                    is_logged, delay = True, APPROVAL_RETRY_SECONDS
                elif error.response.status_code < 500 and error.response.status_code != 429:
                    self._check_key()
                    refused_since = refused_since if refusals else time.monotonic()
                    refusals += 1
                    reason = find_clock_skew(error.response) or REFUSED_MESSAGE
                    if refusals == REFUSALS_BEFORE_WARNING:
                        log.warning("%s: %s; retrying", name, reason)
                    if time.monotonic() - refused_since > ADMISSION_SECONDS:
                        raise ServerRefusal(
                            f"{name}: {reason} for {ADMISSION_SECONDS:g} s"
                        ) from None
            except httpx.HTTPError as error:
                self._check_kind()
                if not is_logged:
                    log.warning(
                        "%s: no server at %s (%s); retrying", name, self._setup.server, error
                    )
                is_logged = True
            time.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS if not refusals else 5.0)

    def _check_key(self) -> None:
        """End this process if its key was replaced: the next one reads the new key."""
        key = self._setup.key
        if key is not None and Path(key).read_bytes() != self._key_file:
            raise ConnectionError(f"device {self._setup.device}: its key was replaced")

    def _check_kind(self) -> None:
        """Raise `ServerChanged` if the server speaks another protocol now."""
        host, _, port = self._setup.server.rpartition(":")
        ca = None if self._setup.ca is None else Path(self._setup.ca)
        with suppress(OSError):  # it is not up
            kind = detect_protocol(host.strip("[]"), int(port), ca)
            if kind != "federated":
                self._changed_to = kind
        if self._changed_to:
            raise ServerChanged(f"{self._setup.server} now serves a {self._changed_to} run")

    def _send_heartbeats(self, stop: threading.Event) -> None:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not stop.wait(HEARTBEAT_SECONDS / 2):
            with suppress(httpx.HTTPError):  # polling notices if the server is gone
                self._is_forgotten = not self.client.SendNodeHeartbeat(request).success

    def _handle_messages(self) -> None:
        """Handle messages until the server has forgotten this node."""
        delay, self._is_forgotten = FIRST_RETRY_SECONDS, False
        while not self._is_forgotten:
            try:
                response = self.client.PullMessages(PullMessagesRequest(node=self._node))
                delay = FIRST_RETRY_SECONDS
                if not response.messages_list:
                    time.sleep(POLL_SECONDS)
                    continue
                self._handle_message(response.messages_list[0], response.message_object_trees[0])
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.UNAUTHORIZED:
                    return
                time.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_SECONDS)
            except httpx.HTTPError:
                self._check_kind()
                time.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_SECONDS)

    def _handle_message(self, proto: Any, tree: ObjectTree) -> None:
        message = message_from_proto(proto)
        run_id, arrived_at = int(message.metadata.run_id), time.monotonic()
        try:
            self._check_run(run_id)
            body = self._pull_body(run_id, tree)
            self._confirm(run_id, tree)
            seconds = message.metadata.ttl
            raw = self._call_worker(ARRIVAL_HEADER.pack(arrived_at) + body, seconds)
            reply = Message(make_content(raw, device=self._setup.device), reply_to=message)
        except MessageRefused as reason:
            log.warning("device %s: refused a message: %s", self._setup.device, reason)
            with suppress(httpx.HTTPError):
                self._confirm(run_id, tree)  # or later versions of Flower deliver it again
            error = Error(ErrorCode.INVALID_FAB, str(reason))
            reply = Message(error, reply_to=message)
        except TimeoutError:
            log.warning("device %s: the worker has not answered in time", self._setup.device)
            return
        except (EOFError, OSError) as problem:  # the worker died, or there is none
            error = Error(
                ErrorCode.CLIENT_APP_CRASHED, f"the worker failed: {type(problem).__name__}"
            )
            reply = Message(error, reply_to=message)
        self._push(run_id, reply, time.monotonic() - arrived_at)

    def _confirm(self, run_id: int, tree: ObjectTree) -> None:
        """Tell the server that a message need not be delivered again."""
        confirmation = ConfirmMessageReceivedRequest(
            node=self._node, run_id=run_id, message_object_id=tree.object_id
        )
        self._call(self.client.ConfirmMessageReceived, confirmation)

    def _check_run(self, run_id: int) -> None:
        if run_id not in self._runs:
            run = self.client.GetRun(GetRunRequest(node=self._node, run_id=run_id)).run
            self._runs[run_id] = run.fab_hash
        if self._runs[run_id] != APP_HASH:
            found = self._runs[run_id][:16]
            raise MessageRefused(f"expected pliant's app {APP_HASH[:16]}, got {found}")

    def _pull_body(self, run_id: int, tree: ObjectTree) -> bytes:
        """Return the body of a message, of which no more is read than can be valid."""
        max_bytes = read_byte_limit(self._byte_limit)
        reason = f"expected a message of at most {max_bytes} bytes"
        object_ids = [node.object_id for node in iterate_object_tree(tree)]
        if len(object_ids) > max_bytes // OBJECT_BYTES + EXTRA_OBJECTS:
            raise MessageRefused(reason)
        contents: dict[str, bytes] = {}
        for object_id in object_ids:
            contents[object_id] = self._pull_object(run_id, object_id)
            if sum(map(len, contents.values())) > max_bytes + OBJECT_BYTES:
                raise MessageRefused(reason)
        try:
            body = extract_body(inflate_object_from_contents(tree.object_id, contents))
        except Exception as error:
            raise MessageRefused(
                f"expected a readable message, got {type(error).__name__}"
            ) from None
        if len(body) > max_bytes:
            raise MessageRefused(reason)
        return body

    def _pull_object(self, run_id: int, object_id: str) -> bytes:
        """Return an object, which the server may still be receiving."""
        end, delay = time.monotonic() + OBJECT_SECONDS, FIRST_RETRY_SECONDS
        while True:
            request = PullObjectRequest(node=self._node, run_id=run_id, object_id=object_id)
            response = self._call(self.client.PullObject, request)
            if response.object_available:
                content: bytes = response.object_content
                return content
            if not response.object_found or time.monotonic() > end:
                raise MessageRefused("expected a complete message")
            time.sleep(delay)

    def _push(self, run_id: int, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            header = remove_content_from_message(reply) if reply.has_content() else reply
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(header)],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            response = self._call(self.client.PushMessages, request)
            for object_id in response.objects_to_push:
                request = PushObjectRequest(
                    node=self._node,
                    run_id=run_id,
                    object_id=object_id,
                    object_content=objects[object_id].deflate(),
                    session_id=response.session_id,
                )
                self._call(self.client.PushObject, request)

    def _call(self, call: Callable[[Any], Any], request: Any) -> Any:
        """Call the server, again if it is busy or the connection broke: messages come only once."""
        end, delay = time.monotonic() + OBJECT_SECONDS, FIRST_RETRY_SECONDS
        while True:
            try:
                return call(request)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if (status != httpx.codes.TOO_MANY_REQUESTS and status < 500) or (
                    time.monotonic() > end
                ):
                    raise
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
            time.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)


def find_clock_skew(response: httpx.Response) -> str | None:
    """Return how wrong this machine's clock is by the server's, if that explains a refusal."""
    try:
        skew = time.time() - parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None
    if abs(skew) <= MAX_SKEW_SECONDS:
        return None
    direction = "ahead of" if skew > 0 else "behind"
    return f"this machine's clock is {abs(skew):.0f} s {direction} the server's; set the clock"


def _load_key(raw: bytes) -> tuple[Any, Any]:
    key: Any = load_ssh_private_key(raw, None)
    return key, key.public_key()


def _stop_on_signal(signum: int, frame: object) -> None:
    raise SystemExit(0)


def main(setup: DeviceSetup) -> None:
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _stop_on_signal)
    Heartbeat(Path(setup.heartbeat)).start()
    node = FleetNode(setup, partial(call_worker, setup.socket))
    try:
        node.run()
    except SystemExit:
        pass
    finally:
        node.leave()


if __name__ == "__main__":
    run_process(main, DeviceSetup, (ServerRefusal, OSError, ValueError), uses_torch=False)
