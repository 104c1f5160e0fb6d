"""Two devices of one number: the second is sent away in one line, and the first goes on."""

import logging
import queue
import socket
import threading
import time
from contextlib import suppress

import grpc
import pytest
from split_near import described, devices_of, dialler, dialling, service_of, simulated

from pliant.deploy import split_hub, split_stream
from pliant.deploy.split_device import SplitDevice
from pliant.deploy.split_frames import Hello, Proof, Welcome, framed, read_down
from pliant.deploy.split_line import Line
from pliant.engine.ledger import TaskRecord
from pliant.engine.store import events


def test_a_line_is_one_process_at_a_time():
    line = Line(0, seconds=1.0)
    first = line.attach("one")
    assert line.attach("two") is None
    line.ready(first, line.epoch, 0)
    assert line.is_ready  # nothing has happened to the first
    again = line.attach("one")  # its stream has broken, and nobody has found out yet
    assert again not in (None, first)
    line.detach(first)  # now somebody has
    assert line.attach("two") is None
    line.detach(again)
    assert line.attach("two") is not None


def test_the_second_is_refused_in_one_line_and_the_first_trains_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(split_stream, "TRIES", 3)
    is_told, refusals = threading.Event(), []

    class Slow(SplitDevice):
        """A device that waits in its third question until the other one was sent away."""

        def answered(self, question, tensors):
            if self.number == 1 and question.number == 3:
                is_told.wait(60)
            return super().answered(question, tensors)

    experiment = described(tmp_path, "split", rounds=1)
    service = service_of(experiment)

    def second():
        while not service.lines[1].is_in:
            time.sleep(0.02)
        [twin] = devices_of([1], tmp_path / "elsewhere").values()
        try:
            dialler(twin, service.hub.port, process="twin").attend()
        except PermissionError as error:
            refusals.append(str(error))
        is_told.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    devices = devices_of(range(3), tmp_path, Slow)
    with (
        caplog.at_level(logging.WARNING, "pliant"),
        dialling(devices, service.hub.port, tmp_path),
    ):
        [record] = service.rounds(tmp_path / "run")
    thread.join(10)
    place = f"127.0.0.1:{service.hub.port}"
    why = "device 1: expected one device of this number, got a second one"
    assert refusals == [f"{place} refuses: {why}"]
    # each side says it once, however often it was dialled
    assert sorted(text.partition("device 1: ")[2] for text in caplog.messages) == [
        why.partition("device 1: ")[2],
        f"{why}; trying again for a minute".partition("device 1: ")[2],
    ]
    assert service.lines[1].resumed == 0  # the first one's stream has never broken
    assert record.digest == simulated(experiment)[-1].digest
    found = [task.end for task in events(tmp_path / "run") if isinstance(task, TaskRecord)]
    assert found == ["finished"] * 3


class Swallowing:
    """A cable for one connection that swallows everything once it is broken, and stays open."""

    def __init__(self, port):
        self.is_broken = threading.Event()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._ends = []
        threading.Thread(target=self._join, args=(port,), daemon=True).start()

    def _join(self, port):
        near, _ = self._door.accept()
        far = socket.create_connection(("127.0.0.1", port))
        self._ends = [near, far]
        for pair in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.is_broken.is_set():
                    target.sendall(data)

    def close(self):
        self._door.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_stream_that_is_dead_at_the_other_end_keeps_no_device_out(tmp_path, monkeypatch):
    monkeypatch.setattr(split_hub, "PULSE", 1000)
    monkeypatch.setattr(split_hub, "DEAD", 1000)
    service = service_of(described(tmp_path, rounds=1))
    service.hub.start()
    cable, said = Swallowing(service.hub.port), queue.Queue()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{cable.port}") as channel:
            call = channel.stream_stream("/pliant.Split/Work")(iter(said.get, None))
            said.put(framed(Hello(0, "before the loss of power")))
            next(call)
            said.put(framed(Proof(b"")))
            assert isinstance(read_down(next(call))[0], Welcome)
            cable.is_broken.set()
            with dialling(devices_of([0], tmp_path), service.hub.port, tmp_path):
                end = time.monotonic() + 20
                while not service.lines[0].is_ready and time.monotonic() < end:
                    time.sleep(0.02)
            said.put(None)
            call.cancel()
        assert time.monotonic() < end
    finally:
        cable.close()
        service.hub.close()


def test_a_device_dials_at_a_taken_number_for_longer_than_a_dead_stream_lives(tmp_path):
    [device] = devices_of([0], tmp_path).values()
    one = dialler(device, 1)
    shortest = 0.0
    for tries in range(split_stream.TRIES):
        one._tries = tries
        shortest += min(split_stream.LONGEST, split_stream.FIRST * 2**tries) / 2
        assert one._pause() >= min(split_stream.LONGEST, split_stream.FIRST * 2**tries) / 2
    assert shortest > max(split_hub.DEAD, 1.5 * split_hub.PULSE) / 1000


@pytest.mark.parametrize("process", ["near", "twin"])
def test_a_number_that_is_taken_is_free_for_the_same_process_at_once(process, tmp_path):
    service = service_of(described(tmp_path, rounds=1))
    service.hub.start()
    line = service.lines[0]
    held = line.attach("near")  # a stream that nobody has found broken
    said = queue.Queue()
    with grpc.insecure_channel(f"127.0.0.1:{service.hub.port}") as channel:
        call = channel.stream_stream("/pliant.Split/Work")(iter(said.get, None))
        said.put(framed(Hello(0, process)))
        next(call)
        said.put(framed(Proof(b"")))
        if process == "near":
            assert isinstance(read_down(next(call))[0], Welcome)
        else:
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            assert refused.value.code().name == "ALREADY_EXISTS"
        said.put(None)
        call.cancel()
    line.detach(held)
    service.hub.close()
