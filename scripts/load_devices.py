"""Load a server with many light devices: real protocol, TLS, one enrolled key each, no training.

    python scripts/load_devices.py --devices 1000 --rounds 10 --per-round 100
    python scripts/load_devices.py --devices 500 --hold 30

A `pliant server` over gRPC runs in processes of its own. The devices are coroutines of this
process, which does not import torch. Each makes a key, enrols it with a token over a connection of
its own, is approved, connects, proves its key and declares its data. Then it answers every request
with a valid update of the size of the network, after a pause instead of training. With `--hold`,
all stay connected for so many seconds, and none is asked to train.

The last line is JSON: times, and the memory (PSS), threads, CPU and bytes of the server's
processes, this one apart.
"""

import argparse
import asyncio
import json
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import msgspec
import numpy as np
import psutil

from pliant.deploy.grpc.chunks import MAX_MESSAGE_BYTES, FrameJoiner, iter_chunks
from pliant.deploy.grpc.envelopes import Envelope, open_envelope, seal
from pliant.deploy.grpc.handshake import (
    GRPC_METHOD,
    GRPC_SERVICE,
    HELLO_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    StreamHello,
)
from pliant.deploy.security.certificates import (
    build_challenge,
    make_device_key,
    make_keys,
    read_federation_name,
    sign_with,
)
from pliant.deploy.security.enrolment import EnrolmentReply, make_request
from pliant.deploy.security.registry import DeviceRegistry, Token
from pliant.deploy.versions import DESCRIBE_CALL, ENROL_CALL, ENROL_HEADER, Versions
from pliant.storage import formats

MAGIC, SHARED_MAGIC = b"PLIANT\x00", b"SHARED\x00"  # see pliant.storage.checkpoint, messages
DIGEST_START, BODY_START = len(MAGIC) + 1, len(MAGIC) + 1 + 32
SAMPLES = 20  # of each device
MAX_FRAME_BYTES = 200_000_000
AT_ONCE = 32  # enrolments or connections in progress
SAMPLE_SECONDS = 1.0
MEGABYTE = 1e6
SPEC = """
rounds = {rounds}
per_round = {per_round}
[method]
type = "fedavg"
local = {{ batch = 32 }}
[network]
name = "femnist_cnn"
options = {{ hidden = {hidden} }}
input = [1, 28, 28]
classes = 10
[fleet]
size = {size}
round_seconds = 60.0
[evaluation]
every = 1000000
statistics = {{ type = "running" }}
"""


def decode_message(raw: bytes) -> tuple[Any, dict[str, Any], int]:
    """Return a message's header, and the specs and the size of its tensors."""
    tensors = raw
    if raw.startswith(SHARED_MAGIC):
        (length,) = struct.unpack_from("<I", raw, len(SHARED_MAGIC))
        start = len(SHARED_MAGIC) + 4
        raw, tensors = raw[start : start + length], raw[start + length :]
    specs = _read_json(tensors)
    (length,) = struct.unpack_from("<Q", tensors, BODY_START)
    state = msgspec.json.decode(_read_json(raw)["__metadata__"]["state"])
    specs.pop("__metadata__", None)
    return state, specs, len(tensors) - BODY_START - 8 - length


def _read_json(message: bytes) -> Any:
    (length,) = struct.unpack_from("<Q", message, BODY_START)
    return msgspec.json.decode(message[BODY_START + 8 : BODY_START + 8 + length])


def encode_message(header: Any, specs: dict[str, Any], data: bytes) -> list[bytes]:
    """Return the buffers of a message with these tensors."""
    metadata = {"state": msgspec.json.encode(header).decode()}
    text = msgspec.json.encode({"__metadata__": metadata, **specs})
    text += b" " * (-len(text) % 8)
    number, head = bytes([formats.CHECKPOINT.number]), struct.pack("<Q", len(text)) + text
    digest = sha256(number)
    digest.update(head)
    digest.update(data)
    return [MAGIC + number + digest.digest() + head, data]


class LightFleet:
    """The devices of this process, and what they share."""

    def __init__(self, address: str, keys: Path, pause: float) -> None:
        self.address, self.pause = address, pause
        self.ca = (keys / "ca.crt").read_bytes()
        self.federation = read_federation_name(keys / "ca.crt")
        self.credentials = grpc.ssl_channel_credentials(self.ca)
        self.gate = asyncio.Event()  # closed until all are connected
        self.slots = asyncio.Semaphore(AT_ONCE)
        self.connected = self.updates = self.received_bytes = self.sent_bytes = 0
        self._data = b""

    def open_channel(self) -> Any:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.keepalive_time_ms", 60_000),
        ]
        return grpc.aio.secure_channel(self.address, self.credentials, options)

    def make_data(self, size: int) -> bytes:
        """Return the same small numbers for every update."""
        if len(self._data) != size:
            rng = np.random.default_rng(0)
            self._data = rng.normal(0, 1e-4, size // 4).astype(np.float32).tobytes()
        return self._data


class LightDevice:
    """A device that answers requests without training."""

    def __init__(self, fleet: LightFleet, token: Token) -> None:
        self._fleet, self._token = fleet, token
        self._number = token.number
        self._private_key, self._public_key = make_device_key()

    async def enrol(self) -> None:
        """Send the public key with a token, in the headers of one call."""
        async with self._fleet.slots, self._fleet.open_channel() as channel:
            keys = self._private_key, self._public_key
            request = make_request(self._token, self._fleet.federation, *keys)
            header = msgspec.json.encode(request).decode()
            answer = await _call_headers(channel, ENROL_CALL, [(ENROL_HEADER, header)])
            reply = msgspec.json.decode(answer[ENROL_HEADER], type=EnrolmentReply)
            if reply.reason:
                raise PermissionError(f"device {self._number}: {reply.reason}")

    async def serve(self) -> None:
        """Stay connected until the server ends the stream."""
        fleet = self._fleet
        async with fleet.open_channel() as channel:
            async with fleet.slots:
                headers = self._prove(await _call_headers(channel, DESCRIBE_CALL, []))
                open_stream = channel.stream_stream(f"/{GRPC_SERVICE}/{GRPC_METHOD}")
                call = open_stream(metadata=headers)
                message = await call.read()
            fleet.connected += 1
            joiner = FrameJoiner(lambda: MAX_FRAME_BYTES)
            while message is not grpc.aio.EOF:
                fleet.received_bytes += len(message)
                frame = joiner.add(message)
                if frame is not None:
                    await self._answer(call, frame.read())
                message = await call.read()

    def _prove(self, headers: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        nonce = headers[NONCE_HEADER]
        challenge = build_challenge(nonce, self._fleet.federation, self._number)
        hello = msgspec.json.encode(StreamHello(self._number, f"light {self._number}")).decode()
        signature = sign_with(self._private_key, challenge)
        return (HELLO_HEADER, hello), (NONCE_HEADER, nonce), (SIGNATURE_HEADER, signature)

    async def _answer(self, call: Any, raw: bytes) -> None:
        started_at, frame = time.monotonic(), BytesIO(raw)
        envelope = open_envelope(frame)
        request, specs, size = decode_message(frame.read())
        del raw, frame
        reply = {"device": self._number, "versions": msgspec.to_builtins(Versions())}
        if envelope.is_hello:
            await self._fleet.gate.wait()
            reply |= {"kind": "hello", "declaration": {"max_samples": SAMPLES}}
            buffers = encode_message(reply, {}, b"")
        else:
            await asyncio.sleep(random.uniform(0.5, 1.5) * self._fleet.pause)
            reply |= {"kind": "update", "round": request["round"], "nonce": request["nonce"]}
            reply |= {"rows": [0], "samples": SAMPLES, "num_samples": SAMPLES, "macs": 1.0}
            seconds = time.monotonic() - started_at
            reply |= {"loss": 1.0, "times": [0.0, seconds], "seconds": seconds}
            delta = {f"change/{n.removeprefix('params/')}": spec for n, spec in specs.items()}
            buffers = encode_message(reply, delta, self._fleet.make_data(size))
            self._fleet.updates += 1
        for chunk in iter_chunks(seal(Envelope(envelope.id)), *buffers):
            self._fleet.sent_bytes += len(chunk)
            await call.write(chunk)


async def _call_headers(channel: Any, method: str, metadata: list[Any]) -> dict[str, Any]:
    """Return the headers that answer those of a call."""
    call = channel.stream_stream(method)(metadata=tuple(metadata), wait_for_ready=True)
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    return dict(await call.trailing_metadata())


class Sampler:
    """Measure a process and its children in a thread, again and again."""

    def __init__(self, pid: int) -> None:
        self._root, self._stop = psutil.Process(pid), threading.Event()
        self.peak: dict[str, float] = {}  # of each process: PSS in MB
        self.threads: dict[str, int] = {}
        self.total = self.cpu = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.measure()

    def measure(self) -> float:
        """Measure now; return the CPU seconds of all processes so far."""
        total = cpu = 0.0
        for process in (self._root, *self._root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = " ".join(process.cmdline())
                name = "run" if "federated_main" in command else f"supervisor {process.pid}"
                pss = process.memory_full_info().pss / MEGABYTE
                self.peak[name] = max(self.peak.get(name, 0.0), round(pss, 1))
                self.threads[name] = max(self.threads.get(name, 0), process.num_threads())
                total += pss
                cpu += sum(process.cpu_times()[:2])
        self.total, self.cpu = max(self.total, total), max(self.cpu, cpu)
        return cpu

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def run_server(folder: Path, spec: str) -> Iterator[tuple[int, int]]:
    """Run a server until the end of the context; yield its port and process id."""
    (folder / "load.toml").write_text(spec)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pliant", "server", "load.toml", "--keys", "keys"]
    command += ["--port", str(port), "--out", "run", "--transport", "grpc", "--patience", "1800"]
    command += ["--allowance", "300"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                time.sleep(0.2)
            else:
                raise ChildProcessError(f"the server ended with {process.returncode}")
            yield port, process.pid
        finally:
            process.terminate()


async def load(options: argparse.Namespace, folder: Path, port: int, pid: int) -> dict[str, Any]:
    """Enrol and connect the devices, let them train, and return what it cost."""
    fleet = LightFleet(f"127.0.0.1:{port}", folder / "keys", options.pause)
    sampler, registry = Sampler(pid), DeviceRegistry(folder / "keys")
    start = time.monotonic()
    tokens = registry.issue_tokens(options.devices, seconds=3600)
    devices = [LightDevice(fleet, token) for token in tokens]
    await asyncio.gather(*(device.enrol() for device in devices))
    registry.approve(*(token.number for token in tokens))
    enrolled = time.monotonic()
    streams = [asyncio.ensure_future(device.serve()) for device in devices]
    while fleet.connected < len(devices):
        for stream in streams:
            if stream.done():
                stream.result()  # raises
        await asyncio.sleep(0.05)
    connected, cpu = time.monotonic(), sampler.measure()
    result: dict[str, Any] = {
        "devices": len(devices),
        "enrolled_seconds": round(enrolled - start, 2),
        "connected_seconds": round(connected - enrolled, 2),
        "connected_cpu_seconds": round(cpu, 2),
    }
    fleet.gate.set()
    if options.hold:
        await asyncio.sleep(options.hold)
        idle = sampler.measure() - cpu
        result["idle_cpu_ms_per_device_second"] = 1000 * idle / options.hold / len(devices)
    else:
        await asyncio.gather(*streams, return_exceptions=True)  # until the run is over
        result |= read_rounds(folder / "run" / "events.jsonl", time.monotonic() - connected)
        tasks = max(1, fleet.updates)
        result["cpu_seconds_per_task"] = round((sampler.cpu - cpu) / tasks, 4)
        result["bytes_per_task"] = (fleet.received_bytes + fleet.sent_bytes) // tasks
    sampler.close()
    result |= {
        "pss_mb": round(sampler.total, 1),
        "pss_mb_by_process": sampler.peak,
        "threads": sampler.threads,
        "generator_rss_mb": round(psutil.Process().memory_info().rss / MEGABYTE, 1),
        "imports_torch": "torch" in sys.modules,
    }
    for stream in streams:
        stream.cancel()
    return result


def read_rounds(path: Path, seconds: float) -> dict[str, Any]:
    """Return what the records say of the rounds."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [record for record in records if "outcomes" in record]
    ends = [0.0, *(record["seconds"] for record in rounds)]
    lengths = [round(b - a, 2) for a, b in pairwise(ends)]
    outcomes: dict[str, int] = {}
    for record in rounds:
        for name, count in record["outcomes"].items():
            outcomes[name] = outcomes.get(name, 0) + count
    return {
        "rounds": len(rounds),
        "round_seconds": lengths[1:],
        "median_round_seconds": median(lengths[1:] or lengths),
        "all_rounds_seconds": round(seconds, 2),
        "outcomes": outcomes,
    }


def main() -> int:
    """Run the server and the devices, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=2400, help="units; 2400 make 10 MB")
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds of a training")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds to stay connected, idle")
    options = parser.parse_args()
    size, per_round = options.devices, options.per_round
    if options.hold:  # one device never comes, and the first round waits for all
        size = per_round = options.devices + 1
    sizes = {"size": size, "per_round": per_round, "rounds": options.rounds}
    with tempfile.TemporaryDirectory(prefix="load_devices_") as name:
        folder = Path(name)
        make_keys(folder / "keys")
        with run_server(folder, SPEC.format(hidden=options.hidden, **sizes)) as (port, pid):
            result = asyncio.run(load(options, folder, port, pid))
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
