"""Requests to a real SuperLink over HTTP: who is let in, and how much of a body is read."""

import asyncio
import sys
from base64 import b64encode

import httpx
import psutil
import pytest

from pliant.deploy.settings import CONTROL_SECRET_VARIABLE, OBJECT_BYTES

# importing Flower's old Typer warns under a new Click
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SECRET, SUPEREXEC_SECRET = "the secret of the control routes", b"that of SuperExec"
CONTROL = {"authorization": f"Bearer {SECRET}"}
PROTOBUF = {"content-type": "application/protobuf"}
MEGABYTE = 1024 * 1024
CLOSED = ["/docs", "/openapi.json", "/v1/fleetwide", "/v1/control/list-runs", "/v1/control/add-app"]
CLOSED += ["/v1/control/register-node"]
CLOSED += ["/v1/control/../fleet", "//v1/control/start-run", "/v1/control/start-automation"]
SECRET_ROUTES = ["/v1/control/start-run", "/v1/control/stop-run"]
SECRET_ROUTES += ["/v1/runtime/push-messages", "/v1/runtime/acquire-task", "/v1/runtime/responses"]
SECRET_ROUTES += ["/v1/fleet/pull-messages", "/v1/fleet/push-messages", "/v1/fleet/get-fab"]


@pytest.fixture
def app(monkeypatch, tmp_path):
    """Return the app that `python -m pliant.deploy.flower.superlink` would serve."""
    import flwr.superlink.cli
    import flwr.superlink.main

    from pliant.deploy.flower import superlink

    monkeypatch.setattr(flwr.superlink.main, "create_app", flwr.superlink.main.create_app)
    monkeypatch.setattr(flwr.superlink.cli, "flower_superlink", lambda: None)
    monkeypatch.setattr(sys, "argv", ["superlink", str(tmp_path / "limit"), ""])
    monkeypatch.setenv(CONTROL_SECRET_VARIABLE, SECRET)
    superlink.main()
    app = flwr.superlink.main.create_app()
    app.state.superexec_auth_secret = SUPEREXEC_SECRET
    app.state.limit_path = tmp_path / "limit"
    return app


def post(app, path, *, client="10.0.0.7", headers=(), content=b""):
    """Return the status and the body of a response to a client with this address."""

    async def request():
        transport = httpx.ASGITransport(app, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as session:
            return await session.post(path, headers=PROTOBUF | dict(headers), content=content)

    response = asyncio.run(request())
    return response.status_code, response.text


def make_device(app, *, is_registered=True):
    """Return the public key of a device and a function that signs a request."""
    from flwr.supercore.date import now
    from flwr.supercore.primitives import asymmetric

    private, public = asymmetric.generate_key_pairs()
    key = asymmetric.public_key_to_bytes(public)
    if is_registered:
        app.state.linkstate_factory.state().create_node("owner", "name", key, 10.0)

    def sign():
        timestamp = now().isoformat()
        signature = asymmetric.sign_message(private, timestamp.encode())
        return {
            "flwr-public-key": b64encode(key).decode(),
            "flwr-timestamp": timestamp,
            "flwr-signature": b64encode(signature).decode(),
        }

    return key, sign


@pytest.mark.parametrize("headers", [{}, CONTROL])
def test_other_routes_do_not_exist(app, headers):
    for path in CLOSED:
        assert post(app, path, headers=headers) == (404, "there is nothing here\n"), path


@pytest.mark.parametrize("client", ["10.0.0.7", "127.0.0.1", "::1"])
def test_a_route_needs_its_credentials_from_wherever_it_is_called(app, client):
    wrong = {"authorization": "Bearer another secret", "flwr-task-token": "x"}
    for path in SECRET_ROUTES:
        for headers in ({}, wrong):
            assert post(app, path, client=client, headers=headers)[0] == 401, path


def test_control_starts_pliants_app_and_no_other(app):
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    from pliant.deploy.flower.app_bundle import build_app_bundle

    def start(content, app_spec=""):
        request = StartRunRequest(fab=Fab(content=content), app_spec=app_spec)
        raw = request.SerializeToString()
        return post(app, "/v1/control/start-run", headers=CONTROL, content=raw)

    bundle = build_app_bundle()
    assert start(bundle + b" ")[0] == start(b"")[0] == start(bundle, "@flwr/app")[0] == 403
    assert start(bundle)[0] == 200


def test_the_app_is_the_same_in_every_build_of_this_release():
    """The hash is part of the protocol: change it only with `PROTOCOL_VERSION`."""
    from pliant.deploy.flower.app_bundle import APP_HASH

    assert APP_HASH.startswith("0a9957a57919a2e9")


def test_a_registered_device_is_let_in_by_its_signature(app):
    _, sign = make_device(app)
    _, sign_unknown = make_device(app, is_registered=False)
    assert post(app, "/v1/fleet/pull-messages", headers=sign_unknown())[0] == 401
    signed = sign()
    assert post(app, "/v1/fleet/push-object", headers=signed)[1].startswith('{"detail"')  # Flower's
    stolen = signed | {"flwr-signature": sign_unknown()["flwr-signature"]}
    assert post(app, "/v1/fleet/push-object", headers=stolen)[1].startswith("expected the cred")
    old = signed | {"flwr-timestamp": "2020-01-01T00:00:00+00:00"}
    assert post(app, "/v1/fleet/push-object", headers=old)[1].startswith("expected the cred")


@pytest.mark.parametrize("path", ["/v1/fleet/activate-node", "/v1/fleet/push-object", "/health"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_huge_body_of_a_stranger_is_not_read(app, path, is_streamed):
    sent = 0

    async def stream():
        nonlocal sent
        for _ in range(600):
            sent += MEGABYTE
            yield bytes(MEGABYTE)

    content = stream() if is_streamed else bytes(100 * MEGABYTE)
    process = psutil.Process()
    before = process.memory_info().rss
    status, _ = post(app, path, content=content)
    expected = {"/v1/fleet/activate-node": 413, "/v1/fleet/push-object": 401, "/health": 200}
    assert status == expected[path]
    if is_streamed:
        assert sent <= 2 * MEGABYTE
        assert process.memory_info().rss - before < 20 * MEGABYTE


def test_a_device_sends_no_body_that_is_larger_than_an_object(app):
    _, sign = make_device(app)
    content = bytes(OBJECT_BYTES + 1)
    assert post(app, "/v1/fleet/push-object", headers=sign(), content=content)[0] == 413


def test_a_reply_is_refused_before_it_is_larger_than_a_valid_one(app):
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import ObjectTree

    _, sign = make_device(app)
    app.state.limit_path.write_text(str(2 * OBJECT_BYTES))

    def push(name, content):
        return post(app, f"/v1/fleet/{name}", headers=sign(), content=content)[0]

    wide = ObjectTree(children=[ObjectTree() for _ in range(100)])
    request = PushMessagesRequest(message_object_trees=[wide])
    assert push("push-messages", request.SerializeToString()) == 413
    assert push("push-messages", PushMessagesRequest().SerializeToString()) != 413
    pieces = [push("push-object", bytes(OBJECT_BYTES // 2)) for _ in range(6)]
    assert [status == 413 for status in pieces] == [False] * 4 + [True] * 2
    assert push("push-messages", PushMessagesRequest().SerializeToString()) != 413
    assert push("push-object", bytes(OBJECT_BYTES // 2)) != 413


def test_a_peer_may_not_flood_and_others_are_not_affected(app, monkeypatch):
    # on a slow machine, requests come no faster than the limit allows
    monkeypatch.setattr("pliant.deploy.flower.guard.REQUESTS_PER_SECOND", 0.0)
    statuses = [post(app, "/v1/fleet/activate-node")[0] for _ in range(220)]
    assert [status == 429 for status in statuses] == [False] * 200 + [True] * 20
    assert post(app, "/v1/fleet/activate-node", client="10.0.0.8")[0] != 429
    _, sign = make_device(app)
    assert post(app, "/v1/fleet/pull-messages", headers=sign())[0] != 429


def test_lines_beyond_a_rate_are_dropped_and_counted():
    import logging

    from pliant.deploy.flower.superlink import LINE_BURST, LineLimit

    limit = LineLimit()
    now = [0.0]
    limit._rates.clock = lambda: now[0]
    make = lambda: logging.LogRecord("flwr", 20, "", 0, "line %d", (1,), None)  # noqa: E731
    assert sum(limit.filter(make()) for _ in range(1000)) == LINE_BURST
    now[0] = 1.0
    record = make()
    assert limit.filter(record)
    assert record.getMessage() == "line 1 (800 lines dropped)"
