"""A device's connection and a server that sends too much, or another app."""

import gzip
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest

from pliant.deploy.device.host import DeviceSetup, Limits
from pliant.deploy.settings import BYTE_LIMIT_FILE, HELLO_BYTES, OBJECT_BYTES

# importing Flower's old Typer warns under a new Click
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MEGABYTE = 1024 * 1024


@contextmanager
def serve_response(headers, chunks):
    """Serve one response to every request; yield its address and the bytes sent so far."""
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for chunk in chunks:
                    self.wfile.write(chunk)
                    sent.append(len(chunk))
            except OSError:
                pass  # the client has had enough

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", sent
        server.shutdown()


def test_no_response_is_read_that_is_larger_than_an_object():
    from pliant.deploy.flower.limited_transport import LimitedTransport

    with (
        serve_response({}, (bytes(MEGABYTE) for _ in range(600))) as (address, sent),
        httpx.Client(transport=LimitedTransport()) as client,
    ):
        with pytest.raises(httpx.DecodingError, match=f"at most {OBJECT_BYTES} bytes"):
            client.get(address)
        assert sum(sent) < 100 * MEGABYTE


def test_a_compressed_response_is_not_unpacked():
    from pliant.deploy.flower.limited_transport import LimitedTransport

    bomb = gzip.compress(bytes(100 * MEGABYTE))
    with (
        serve_response({"content-encoding": "gzip"}, [bomb]) as (address, _),
        httpx.Client(transport=LimitedTransport()) as client,
        pytest.raises(httpx.DecodingError, match="without compression"),
    ):
        client.get(address)


class FakeServer:
    """Answer a device's calls with one message of an app; keep its reply."""

    def __init__(self, app_hash, raw):
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
        )
        from flwr.supercore.task_identity import TaskIdentity

        from pliant.deploy.flower.client_app import make_content

        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        message = Message(make_content(raw), dst_node_id=7, message_type="train")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.message, self.tree = message, get_object_tree(message)
        self.objects = {k: o.deflate() for k, o in get_all_nested_objects(message).items()}
        self.app_hash, self.pulled, self.replies, self.asked = app_hash, 0, [], set()
        self.calls, self.confirmed = 0, []

    def GetRun(self, request):  # as Flower's client names it
        return SimpleNamespace(run=SimpleNamespace(fab_hash=self.app_hash))

    def PullObject(self, request):
        self.calls += 1
        if self.calls % 3 == 0:
            raise httpx.ReadError("the connection broke")
        if self.calls % 3 == 1:
            response = httpx.Response(429, request=httpx.Request("POST", "http://server"))
            response.raise_for_status()
        content = self.objects[request.object_id]
        is_available = request.object_id in self.asked  # at first, it is still on its way
        self.asked.add(request.object_id)
        self.pulled += len(content) if is_available else 0
        return SimpleNamespace(
            object_found=True, object_available=is_available, object_content=content
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)

    def PushMessages(self, request):
        self.replies.append(request.messages_list[0])
        return SimpleNamespace(objects_to_push=[], session_id="")


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch):
    from pliant.deploy.flower import node

    monkeypatch.setattr(node, "FIRST_RETRY_SECONDS", 0.0)


def handle(folder, app_hash, raw):
    """Return what a device replies to a message, and which requests its worker got."""
    from flwr.common.serde import message_to_proto

    from pliant.deploy.flower.node import FleetNode

    requests, server = [], FakeServer(app_hash, raw)

    def call_worker(request, seconds):
        requests.append(request)
        return b"reply"

    node = FleetNode(DeviceSetup(0, str(folder), Limits(), "127.0.0.1:9"), call_worker)
    node.client = server
    node._handle_message(message_to_proto(server.message), server.tree)
    (reply,) = server.replies
    assert server.confirmed == [server.message.object_id]  # also of a message that is refused
    return reply.error.reason, requests, server.pulled


def test_a_device_answers_only_pliants_app(tmp_path):
    from pliant.deploy.flower.app_bundle import APP_HASH

    reason, requests, _ = handle(tmp_path, APP_HASH, b"request")
    assert not reason
    assert [request[8:] for request in requests] == [b"request"]
    reason, requests, pulled = handle(tmp_path, "0" * 64, b"request")
    assert reason == f"expected pliant's app {APP_HASH[:16]}, got {'0' * 16}"
    assert (requests, pulled) == ([], 0)


def test_a_device_reads_no_message_that_is_larger_than_a_valid_one(tmp_path):
    from pliant.deploy.flower.app_bundle import APP_HASH

    for size in (HELLO_BYTES + 1, 40 * MEGABYTE):
        reason, requests, pulled = handle(tmp_path, APP_HASH, bytes(size))
        assert reason == f"expected a message of at most {HELLO_BYTES} bytes"
        assert requests == []
        assert pulled < HELLO_BYTES + 2 * OBJECT_BYTES
    (tmp_path / BYTE_LIMIT_FILE).write_text(str(2 * HELLO_BYTES))  # by the worker
    assert len(handle(tmp_path, APP_HASH, bytes(HELLO_BYTES + 1))[1]) == 1


@pytest.mark.parametrize(("minutes", "text"), [(6, "360 s behind"), (-6, "360 s ahead of")])
def test_a_wrong_clock_is_named_as_the_cause(minutes, text):
    from pliant.deploy.flower.node import find_clock_skew

    def find(minutes):
        date = datetime.fromtimestamp(time.time(), UTC) + timedelta(minutes=minutes)
        headers = {"date": format_datetime(date.replace(microsecond=0), usegmt=True)}
        return find_clock_skew(httpx.Response(401, headers=headers))

    assert find(0) is None
    assert find_clock_skew(httpx.Response(401)) is None
    reason = find(minutes)
    assert reason.startswith("this machine's clock is 3")  # 359 to 361 s
    assert reason.endswith(f"{text.partition(' s ')[2]} the server's; set the clock")
