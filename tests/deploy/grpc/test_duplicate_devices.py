"""Two devices with the same number: the second is refused in one line, and the first continues."""

import logging
import queue
import socket
import threading
from contextlib import suppress

import grpc
import pytest
from tests.deploy.grpc_in_process import (
    connect_devices,
    make_client,
    make_devices,
    make_experiment,
    make_server_run,
    open_raw_stream,
    simulate_rounds,
)
from tests.waiting import LIMIT, wait_until

from pliant.deploy.grpc import client, server
from pliant.deploy.grpc.channel import DeviceChannel
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.frames import ServerHeader, SplitRunConfig
from pliant.deploy.messages import decode_message
from pliant.engine.ledger import TaskRecord
from pliant.engine.run_store import read_records

pytestmark = pytest.mark.waits


def test_a_channel_serves_one_process_at_a_time():
    channel = DeviceChannel(0, timeout=1.0)
    first = channel.attach("first process")
    assert channel.attach("second process") is None
    channel.mark_ready(first, channel.epoch, 0)
    assert channel.is_ready  # the first one is unaffected
    again = channel.attach(
        "first process"
    )  # its stream is broken, which the server does not know yet
    assert again not in (None, first)
    channel.detach(first)  # now it does
    assert channel.attach("second process") is None
    channel.detach(again)
    assert channel.attach("second process") is not None


def test_the_second_is_refused_in_one_line_and_the_first_trains_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(client, "MAX_DUPLICATE_RETRIES", 3)
    is_refused, refusals = threading.Event(), []

    class WaitingDevice(SplitDevice):
        """A device that waits in its third request until its duplicate is refused."""

        def handle_request(self, request, tensors):
            if self.number == 1 and request.number == 3:
                is_refused.wait(LIMIT)
            return super().handle_request(request, tensors)

    experiment = make_experiment(tmp_path, "split", rounds=1)
    server_run = make_server_run(experiment)

    def run_duplicate():
        wait_until(lambda: server_run.channels[1].is_in_round, "the round to start")
        [duplicate] = make_devices([1], tmp_path / "elsewhere").values()
        try:
            make_client(duplicate, server_run.grpc_server.port, process="duplicate").run()
        except PermissionError as error:
            refusals.append(str(error))
        is_refused.set()

    thread = threading.Thread(target=run_duplicate, daemon=True)
    thread.start()
    devices = make_devices(range(3), tmp_path, WaitingDevice)
    with (
        caplog.at_level(logging.WARNING, "pliant"),
        connect_devices(devices, server_run.grpc_server.port, tmp_path),
    ):
        [record] = server_run.run_rounds(tmp_path / "run")
    thread.join(LIMIT)
    reason = "expected one device with this number, got a second"
    assert refusals == [f"127.0.0.1:{server_run.grpc_server.port} refuses: device 1: {reason}"]
    # each side logs it once, whatever the number of attempts
    assert sorted(message.partition("device 1: ")[2] for message in caplog.messages) == [
        reason,
        f"{reason}; retrying for a minute",
    ]
    assert server_run.channels[1].resumed_streams == 0  # the first one's stream never broke
    assert record.digest == simulate_rounds(experiment)[-1].digest
    tasks = [task for task in read_records(tmp_path / "run") if isinstance(task, TaskRecord)]
    assert [task.outcome for task in tasks] == ["finished"] * 3


class BlackHoleProxy:
    """A proxy for one connection that, once broken, stays open but drops all data."""

    def __init__(self, port):
        self.is_broken = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = []
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def _accept(self, port):
        source, _ = self._listener.accept()
        target = socket.create_connection(("127.0.0.1", port))
        self._sockets = [source, target]
        for pair in ((source, target), (target, source)):
            threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.is_broken.is_set():
                    target.sendall(data)

    def close(self):
        self._listener.close()
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def test_a_stream_whose_peer_is_gone_keeps_no_device_out(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(server, "PING_TIMEOUT_MS", 5000)
    server_run = make_server_run(make_experiment(tmp_path, rounds=1))
    server_run.grpc_server.start()
    proxy, outgoing = BlackHoleProxy(server_run.grpc_server.port), queue.Queue()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            frames = iter(outgoing.get, None)
            call = open_raw_stream(channel, frames, process="before the power loss")
            assert isinstance(decode_message(next(call)[1:], ServerHeader)[0], SplitRunConfig)
            proxy.is_broken.set()
            devices = make_devices([0], tmp_path)
            with connect_devices(devices, server_run.grpc_server.port, tmp_path):
                wait_until(lambda: server_run.channels[0].is_ready, "the device to join")
            outgoing.put(None)
            call.cancel()
    finally:
        proxy.close()
        server_run.grpc_server.close()


def test_a_device_retries_a_taken_number_for_longer_than_a_dead_stream_lives(tmp_path):
    [device] = make_devices([0], tmp_path).values()
    grpc_client = make_client(device, 1)
    total = 0.0
    for attempt in range(client.MAX_DUPLICATE_RETRIES):
        grpc_client._attempts = attempt
        shortest = min(client.MAX_RETRY_SECONDS, client.FIRST_RETRY_SECONDS * 2**attempt) / 2
        assert grpc_client._compute_retry_delay() >= shortest
        total += shortest
    assert total > max(server.PING_TIMEOUT_MS, 1.5 * server.KEEPALIVE_MS) / 1000


@pytest.mark.parametrize("process", ["original", "duplicate"])
def test_a_taken_number_is_free_for_the_same_process_at_once(process, tmp_path):
    server_run = make_server_run(make_experiment(tmp_path, rounds=1))
    server_run.grpc_server.start()
    device_channel = server_run.channels[0]
    stream_id = device_channel.attach("original")  # broken, which the server does not know yet
    outgoing = queue.Queue()
    with grpc.insecure_channel(f"127.0.0.1:{server_run.grpc_server.port}") as channel:
        call = open_raw_stream(channel, iter(outgoing.get, None), process=process)
        if process == "original":
            assert isinstance(decode_message(next(call)[1:], ServerHeader)[0], SplitRunConfig)
        else:
            with pytest.raises(grpc.RpcError) as refusal:
                next(call)
            assert refusal.value.code().name == "ALREADY_EXISTS"
        outgoing.put(None)
        call.cancel()
    device_channel.detach(stream_id)
    server_run.grpc_server.close()
