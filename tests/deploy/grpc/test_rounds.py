"""Federated rounds over gRPC: real streams, TLS and keys on loopback, devices as threads."""

import logging
import socket
import threading
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from itertools import islice

import grpc
import pytest
from tests.deploy.faulty_proxy import FaultyProxy
from tests.deploy.federation_keys import make_federation_keys, make_stranger_key
from tests.deploy.grpc_in_process import Killed, open_raw_stream
from tests.deploy.in_process import (
    compute_simulated_digest,
    make_context,
    make_devices,
    make_experiment,
    make_own_devices,
    make_own_experiment,
    write_own_data,
)
from tests.waiting import LIMIT, wait_until

from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import DeviceSetup, Limits
from pliant.deploy.grpc.client import GrpcClient
from pliant.deploy.grpc.envelopes import Envelope, seal
from pliant.deploy.grpc.node import RoundNode
from pliant.deploy.grpc.transport import GONE_SECONDS, GrpcTransport, RoundChannel
from pliant.deploy.messages import (
    TrainRequest,
    decode_message,
    encode_for_devices,
    encode_message,
    has_own_data,
)
from pliant.deploy.security.registry import DeviceRegistry
from pliant.deploy.server.replies import RawReply, find_max_reply_bytes
from pliant.deploy.server.rounds import DeviceTransport
from pliant.deploy.server.serve import serve
from pliant.deploy.settings import ARRIVAL_HEADER, ServerRefusal, ServerSettings
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.experiment.build import build_server_context

pytestmark = pytest.mark.waits

HALF = {"speed": {"type": "constant", "low": 0.5}}
TRAINING = threading.Lock()  # devices in one process share the network


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_federation_keys(folder, devices=3)
    return folder


def make_transport(experiment, keys=None, port=0, pace="simulated"):
    """Open the port of a server."""
    hello = TrainRequest("hello", encode_for_devices(experiment, pace), -1, pace=pace)
    context = make_context(experiment)
    return GrpcTransport(
        encode_message(hello),
        experiment.fleet.size,
        address=f"127.0.0.1:{port}",
        keys=keys,
        max_reply_bytes=find_max_reply_bytes(context, experiment.settings.guard),
    )


def iter_rounds(experiment, transport, folder, **options):
    """Run the server's rounds over a transport."""
    fields = {"allowance": LIMIT, "patience": LIMIT, "pace": "simulated"} | options
    settings = ServerSettings(**fields)
    devices = DeviceTransport(experiment, settings, transport, sleep=transport.wait)
    is_own = has_own_data(experiment, settings.pace)
    context = (build_server_context if is_own else make_context)(experiment)
    transport.start()
    try:
        yield from serve(context, devices, folder / "run")
    finally:
        transport.close()


def make_client(agent, port, keys=None, call=None):
    """Return a device's connection, whose worker is an agent in this process."""

    def call_worker(raw, seconds):
        with TRAINING:
            return agent.handle_request(raw[ARRIVAL_HEADER.size :])

    setup = DeviceSetup(agent.number, str(agent.folder), agent.limits)
    agent.folder.mkdir(parents=True, exist_ok=True)
    node = RoundNode(setup, call or call_worker)
    files = {}
    if keys is not None:
        files = {"ca": keys / "ca.crt", "key": keys / "devices" / str(agent.number) / "key"}
    return GrpcClient(node, f"127.0.0.1:{port}", process=str(agent.number), **files)


@contextmanager
def connect(agents, port, keys=None):
    """Connect devices until the end of the context; restart one that is killed at a request."""
    clients, threads, is_over = {}, [], threading.Event()

    def run_device(agent):
        while not is_over.is_set():
            client = clients[agent.number] = make_client(agent, port, keys)

            def handle_requests(client=client):
                with suppress(Killed):
                    client.device.handle_requests()
                client.stop()

            threading.Thread(target=handle_requests, daemon=True).start()
            try:
                client.run()
            except ServerRefusal as refusal:
                client.refusal = str(refusal)
                return

    for agent in agents.values():
        threads.append(threading.Thread(target=run_device, args=(agent,), daemon=True))
        threads[-1].start()
    try:
        yield clients
    finally:
        is_over.set()
        for client in clients.values():
            client.stop()
        for thread in threads:
            thread.join(LIMIT)


def run_rounds(experiment, folder, keys=None, agents=None, through=lambda port: port, **options):
    """Run an experiment with devices that are threads; return all records."""
    transport = make_transport(experiment, keys, pace=options.get("pace", "simulated"))
    agents = agents or make_devices(experiment, folder)
    with connect(agents, through(transport.port), keys):
        list(iter_rounds(experiment, transport, folder, **options))
    records = list(read_records(folder / "run"))
    verify_records(records)
    return records


def list_outcomes(records):
    return [record.outcome for record in records if isinstance(record, TaskRecord)]


BUFFERED = {"type": "fedbuff", "buffer": 2, "inner": {"type": "fedavg", "local": {"batch": 16}}}


@pytest.mark.parametrize(
    ("method", "fleet"), [("scaffold", {}), ("distreal", HALF), (BUFFERED, {})]
)
def test_rehearsals_over_grpc_end_with_the_simulated_weights(tmp_path, keys, method, fleet):
    experiment = make_experiment(method, fleet=fleet, rules={"late": "partial", "grace": 0.0})
    records = run_rounds(experiment, tmp_path, keys)
    assert records[-1].digest == compute_simulated_digest(experiment)


class CountingAgent(DeviceAgent):
    """A device that counts its trainings, and breaks something at each."""

    trainings, at_training = 0, lambda self: None

    def _train(self, *arguments):
        self.trainings += 1
        self.at_training()
        return super()._train(*arguments)


def make_counting_agents(experiment, folder):
    return {
        number: CountingAgent(number, folder / f"device{number}", Limits())
        for number in range(experiment.fleet.size)
    }


def test_a_broken_stream_neither_loses_nor_repeats_a_training(tmp_path):
    proxies = []

    def through(port):
        proxies.append(FaultyProxy(port))
        return proxies[0].port

    experiment = make_experiment("scaffold", rounds=3)
    agents = make_counting_agents(experiment, tmp_path)
    for agent in agents.values():
        agent.at_training = lambda: proxies[0].cut()
    records = run_rounds(experiment, tmp_path, agents=agents, through=through)
    assert proxies[0].cuts == 9
    proxies[0].close()
    assert [agent.trainings for agent in agents.values()] == [3, 3, 3]
    assert list_outcomes(records) == ["finished"] * 9
    assert records[-1].digest == compute_simulated_digest(experiment)


def test_a_killed_device_gets_its_request_again(tmp_path):
    experiment = make_experiment("scaffold", rounds=3)
    agents = make_counting_agents(experiment, tmp_path)

    def die_once():
        if agents[1].trainings == 2:
            raise Killed

    agents[1].at_training = die_once
    records = run_rounds(experiment, tmp_path, agents=agents)
    assert [agent.trainings for agent in agents.values()] == [3, 4, 3]
    assert list_outcomes(records) == ["finished"] * 9
    assert records[-1].digest == compute_simulated_digest(experiment)


def test_a_restarted_server_resumes_from_its_checkpoint(tmp_path):
    experiment = make_experiment("scaffold", rounds=4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with connect(make_devices(experiment, tmp_path), port):
        for count in (1, 2, None):
            transport = make_transport(experiment, port=port)
            rounds = iter_rounds(experiment, transport, tmp_path)
            list(islice(rounds, count))
            rounds.close()
    records = list(read_records(tmp_path / "run"))
    assert verify_records(records) == 4
    assert records[-1].digest == compute_simulated_digest(experiment)


def test_a_failed_worker_is_named_and_the_round_ends_without_it(tmp_path):
    experiment = make_experiment(rounds=1)
    agents = make_devices(experiment, tmp_path)
    agent, transport = agents.pop(2), make_transport(experiment)

    def fail(raw, seconds):
        header, _ = decode_message(raw[ARRIVAL_HEADER.size :], TrainRequest)
        if header.kind == "train":
            raise EOFError
        with TRAINING:
            return agent.handle_request(raw[ARRIVAL_HEADER.size :])

    failing = make_client(agent, transport.port, call=fail)
    for function in (failing.run, failing.device.handle_requests):
        threading.Thread(target=function, daemon=True).start()
    with connect(agents, transport.port):
        list(iter_rounds(experiment, transport, tmp_path))
    failing.stop()
    assert list_outcomes(read_records(tmp_path / "run")) == [
        "finished",
        "finished",
        "dropped: the worker failed: EOFError",
    ]


def test_strangers_are_refused_in_one_line(tmp_path, keys):
    experiment = make_experiment(rounds=1)
    transport = make_transport(experiment, keys)
    transport.start()
    agent = make_devices(experiment, tmp_path)[0]
    client = make_client(agent, transport.port, keys)
    client.key = make_stranger_key(keys, tmp_path / "stranger")
    with pytest.raises(PermissionError, match=r"device 0: expected a registered key$"):
        client.run()
    with pytest.raises(PermissionError, match="got a server that requires --keys"):
        make_client(agent, transport.port).run()
    make_federation_keys(tmp_path / "others", devices=1)
    with pytest.raises(PermissionError, match="expected a certificate of the authority in"):
        make_client(agent, transport.port, tmp_path / "others").run()
    assert transport.find_online_devices() == set()
    transport.close()


def test_a_revoked_device_is_dropped_at_once(tmp_path):
    make_federation_keys(tmp_path / "keys", devices=3)
    experiment = make_experiment(rounds=1)
    agents = make_counting_agents(experiment, tmp_path)
    is_dropped = threading.Event()

    def wait_in_training():
        DeviceRegistry(tmp_path / "keys").revoke(1)
        is_dropped.wait(LIMIT)

    agents[1].at_training = wait_in_training
    transport = make_transport(experiment, tmp_path / "keys")
    with connect({1: agents[1]}, transport.port, tmp_path / "keys") as clients:
        transport.start()
        wait_until(lambda: transport.find_online_devices() == {1}, "device 1 to join")
        request = TrainRequest(
            "train", encode_for_devices(experiment, "simulated"), 1, pace="simulated"
        )
        transport.send({1: encode_message(request)}, round=0, seconds=LIMIT)
        [reply] = wait_until(lambda: list(transport.poll_replies()), "the end of the task")
        is_dropped.set()
        assert reply == RawReply(1, None, "its key was revoked")
        wait_until(lambda: hasattr(clients[1], "refusal"), "the refusal")
    assert clients[1].refusal.endswith("device 1: expected a registered key")
    transport.close()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "INVALID_ARGUMENT"),
        (b"\xff" * 50, "INVALID_ARGUMENT"),
        (b"\x02\x00{}body", "INVALID_ARGUMENT"),
        (bytes(40_000_000), "RESOURCE_EXHAUSTED"),
    ],
)
def test_what_is_no_reply_ends_the_stream(frame, code):
    transport = make_transport(make_experiment())
    transport.start()
    with grpc.insecure_channel(f"127.0.0.1:{transport.port}") as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            list(open_raw_stream(channel, [frame]))
        assert refusal.value.code().name == code
    transport.close()


def take_frames(channel, stream_id):
    """Return what a channel sends on a stream now."""
    return [b"".join(frame) for frame in iter(partial(next, channel.iter_frames(stream_id)), None)]


def test_a_reply_after_the_end_of_the_run_is_closed():
    channel = RoundChannel(0, b"hello", lambda: None, lambda: 0.0)
    stream = channel.attach("process", lambda: None)
    channel.send_request(b"request", 1.0)
    reply = BytesIO(seal(Envelope(channel._request_id)) + b"reply")
    channel.close()
    channel.receive_frame(stream, reply)
    assert reply.closed


def test_a_channel_greets_each_process_once_and_forgets_what_is_given_up():
    now, wakings = [0.0], []
    channel = RoundChannel(0, b"hello", lambda: None, lambda: now[0])

    def attach(process):
        return channel.attach(process, lambda: wakings.append(process))

    def reply(request_id, body):
        return BytesIO(seal(Envelope(request_id)) + body)

    stream = attach("first")
    [hello] = take_frames(channel, stream)
    assert hello.endswith(b"hello")
    assert not channel.is_online
    channel.receive_frame(stream, reply(channel._hello_id, b"hi"))
    assert channel.is_online
    channel.send_request(b"old", 1.0)
    old = channel._request_id
    channel.send_request(b"new", 1.0)
    for _ in range(2):  # what is not answered is sent on each stream
        channel.detach(stream)
        stream = attach("first")
        [request] = take_frames(channel, stream)
        assert request.endswith(b"new")
    channel.receive_frame(stream, reply(old, b"late"))
    assert channel.take_reply() is None
    channel.detach(stream)
    assert attach("second") is not None
    hello, request = take_frames(channel, channel._stream.stream_id)
    assert (hello[-5:], request[-3:]) == (b"hello", b"new")
    channel.detach(channel._stream.stream_id)
    assert channel.is_lost
    now[0] += GONE_SECONDS
    assert channel.take_reply() is None
    now[0] += 1.0
    assert channel.take_reply() == RawReply(0, None, "it was offline for 60 s")


def test_the_ledger_has_the_bytes_on_the_wire(tmp_path, keys):
    """The network is so large that joining, which is not charged, does not matter."""
    proxies = []

    def through(port):
        proxies.append(FaultyProxy(port))
        return proxies[0].port

    network = {"name": "femnist_cnn", "options": {"hidden": 1024}}
    experiment = make_own_experiment(
        network=network, evaluation={"every": 1, "statistics": {"type": "running"}}
    )
    write_own_data(experiment, tmp_path)
    agents = make_own_devices(experiment, tmp_path)
    records = run_rounds(experiment, tmp_path, keys, agents, through, pace="measured")
    proxies[0].close()
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    assert all(record.on_devices.tests == (20, 20, 20) for record in rounds)
    wire = proxies[0].forwarded_bytes
    assert sum(record.sent for record in rounds) == pytest.approx(wire, rel=0.02)


def test_the_log_has_one_line_per_joined_device(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "pliant"):
        run_rounds(make_experiment(), tmp_path)
    assert sorted(caplog.messages) == [f"device {number} joined" for number in range(3)]
