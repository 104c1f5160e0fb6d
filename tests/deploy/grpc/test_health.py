"""The health service, asked by the client library that probes use."""

import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.waiting import LIMIT

from pliant.deploy.grpc.health import MAX_WATCHERS
from pliant.deploy.grpc.server import GrpcServer

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def server():
    server = GrpcServer({}, address="127.0.0.1:0", keys=None, max_message_bytes=100)
    server.start()
    yield server
    server.close()


def ask(method, name=""):
    return method(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT, wait_for_ready=True)


def test_a_probe_hears_that_the_server_serves_and_when_it_ends():
    server = GrpcServer({}, address="127.0.0.1:0", keys=None, max_message_bytes=100)
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert ask(health.Check).status == Status.SERVING
        assert ask(health.Check, "pliant.Split").status == Status.SERVING
        with pytest.raises(grpc.RpcError) as refusal:
            ask(health.Check, "another.Service")
        assert refusal.value.code() == grpc.StatusCode.NOT_FOUND
        assert next(ask(health.Watch, "another.Service")).status == Status.SERVICE_UNKNOWN
        watch = ask(health.Watch)
        assert next(watch).status == Status.SERVING
        closing = threading.Thread(target=server.close)
        closing.start()
        assert [reply.status for reply in watch] == [Status.NOT_SERVING]
        closing.join(LIMIT)


@pytest.mark.parametrize("method", ["Check", "Watch"])
@pytest.mark.parametrize("request_", [b"junk", b"\x0a\x05ab", b"\x0a\x80" + bytes(128), b"\x0a"])
def test_what_is_no_request_is_refused(server, method, request_):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
        with pytest.raises(grpc.RpcError) as refusal:
            list(call(request_, timeout=LIMIT, wait_for_ready=True))
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_watchers_are_limited_and_a_silent_one_is_cut_off(server, monkeypatch):
    monkeypatch.setattr("pliant.deploy.grpc.health.REQUEST_SECONDS", 0.1)
    silence = threading.Event()
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection has a limit of its own
    address = f"127.0.0.1:{server.port}"
    channels = [grpc.insecure_channel(address, options) for _ in range(2)]
    watches = [ask(health_pb2_grpc.HealthStub(channels[0]).Watch) for _ in range(MAX_WATCHERS - 1)]
    assert {next(watch).status for watch in watches} == {Status.SERVING}
    open_stream = channels[1].stream_stream("/grpc.health.v1.Health/Watch")
    with pytest.raises(grpc.RpcError) as refusal:
        list(open_stream(iter(silence.wait, True), timeout=LIMIT, wait_for_ready=True))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # it asked nothing in time
    last = health_pb2_grpc.HealthStub(channels[1])
    watches.append(ask(last.Watch))
    assert next(watches[-1]).status == Status.SERVING
    with pytest.raises(grpc.RpcError) as refusal:
        list(ask(last.Watch))
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    silence.set()
    for channel in channels:
        channel.close()
