"""Health checks and Prometheus metrics of a server, over HTTP.

`/healthz` says whether the supervisor works, `/readyz` whether all its processes run, `/metrics`
what the run has done. The numbers name no device and hold no secret.
"""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pliant.deploy.server.presence import read_presence
from pliant.deploy.server.run_totals import STEP_BUCKETS, RunTotals, TotalsReader
from pliant.deploy.supervise.supervisor import Supervisor
from pliant.storage import run_dir

STUCK_SECONDS = 60.0  # without a check of the processes
REQUEST_SECONDS = 5.0  # for a request to arrive
TEXT = "text/plain; charset=utf-8"
METRICS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class ServerMonitor:
    """Answer requests about a supervisor in threads of their own, until it is closed."""

    def __init__(self, supervisor: Supervisor, host: str, port: int) -> None:
        self._supervisor, self._totals = supervisor, TotalsReader(supervisor.folder)
        self._lock = threading.Lock()  # one reader at a time
        handler = type("MonitorHandler", (_Handler,), {"monitor": self})
        try:
            self._server = _make_server(host, port, handler)
        except (OSError, OverflowError) as error:  # the latter for a port above 65535
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"Cannot listen on {host}:{port} for metrics: {reason}") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, str, str]:
        """Return the status, type and body for a path."""
        match path:
            case "/healthz":
                age = time.monotonic() - self._supervisor.checked_at
                is_fine = age < STUCK_SECONDS
                return (200, TEXT, "ok\n") if is_fine else (503, TEXT, f"stuck for {age:.0f} s\n")
            case "/readyz":
                missing = self._list_missing()
                return (503, TEXT, f"waiting for {missing}\n") if missing else (200, TEXT, "ok\n")
            case "/metrics":
                with self._lock:
                    return 200, METRICS_TEXT, self._format_metrics()
        return 404, TEXT, "expected /healthz, /readyz or /metrics\n"

    def _list_missing(self) -> str:
        running = self._supervisor.pids
        return ", ".join(s.name for s in self._supervisor.services if s.name not in running)

    def _format_metrics(self) -> str:
        folder, running = self._supervisor.folder, self._supervisor.pids
        config = run_dir.read_config(folder)
        presence = read_presence(folder)
        lines = [
            *format_totals(self._totals.read()),
            *_format_gauge("rounds_planned", "Rounds of the run.", config["rounds"]),
            *_format_gauge("devices", "Devices of the fleet.", config["fleet"]["size"]),
            *_format_gauge(
                "devices_online",
                "Devices that the server has seen lately.",
                len(presence.online) if presence.is_fresh(time.time()) else 0,
            ),
            *_format_metric(
                "process_up",
                "gauge",
                "Whether a process of the server runs.",
                {f'{{process="{s.name}"}}': s.name in running for s in self._supervisor.services},
            ),
        ]
        return "\n".join(lines) + "\n"


@contextmanager
def open_monitor(supervisor: Supervisor, host: str, port: int | None) -> Iterator[None]:
    """Answer requests about a supervisor in the block; without a port, none."""
    if port is None:
        yield
        return
    monitor = ServerMonitor(supervisor, host, port)
    try:
        monitor.start()
        yield
    finally:
        monitor.close()


def format_totals(totals: RunTotals) -> Iterator[str]:
    """Yield the lines of metrics of a run's totals."""
    outcomes = {f'{{outcome="{name}"}}': n for name, n in sorted(totals.outcomes.items())}
    sent = {f'{{direction="{name}"}}': totals.sent[name] for name in ("down", "up", "control")}
    yield from _format_metric("rounds_total", "counter", "Rounds closed.", {"": totals.rounds})
    merged = {"": totals.merged_rounds}
    yield from _format_metric("rounds_merged_total", "counter", "Rounds with an update.", merged)
    yield from _format_metric("tasks_total", "counter", "Tasks by outcome.", outcomes)
    yield from _format_metric("bytes_total", "counter", "Bytes to and from devices.", sent)
    yield from _format_steps(totals)
    if totals.last_round is not None:
        last = totals.last_round
        yield from _format_gauge("run_seconds", "Seconds of the run so far.", last.seconds)
        if last.loss is not None:
            yield from _format_gauge("training_loss", "Mean loss on devices.", last.loss)
        if last.epsilon is not None:
            yield from _format_gauge("epsilon", "Differential privacy spent.", last.epsilon)
    if totals.accuracy is not None:
        yield from _format_gauge("accuracy", "Accuracy in the last test.", totals.accuracy)


def _format_steps(totals: RunTotals) -> Iterator[str]:
    count, values = 0, {}
    for limit, number in zip([*STEP_BUCKETS, "+Inf"], totals.step_counts, strict=True):
        count += number
        values[f'_bucket{{le="{limit}"}}'] = float(count)
    values |= {"_sum": totals.step_seconds, "_count": float(count)}
    yield from _format_metric("step_seconds", "histogram", "Time of mini-batches.", values)


def _format_gauge(name: str, purpose: str, value: float) -> Iterator[str]:
    return _format_metric(name, "gauge", purpose, {"": value})


def _format_metric(
    name: str, kind: str, purpose: str, values: Mapping[str, float]
) -> Iterator[str]:
    yield f"# HELP pliant_{name} {purpose}"
    yield f"# TYPE pliant_{name} {kind}"
    for suffix, value in values.items():
        yield f"pliant_{name}{suffix} {float(value):.17g}"


class _Handler(BaseHTTPRequestHandler):
    """Answer GET requests and nothing else; log nothing, as a scraper asks every few seconds."""

    monitor: ServerMonitor
    timeout = REQUEST_SECONDS
    server_version, sys_version = "pliant", ""

    def do_GET(self) -> None:
        try:
            status, kind, body = self.monitor.answer(self.path)
        except (OSError, ValueError) as error:  # such as a run folder that was removed
            status, kind, body = 500, TEXT, f"{type(error).__name__}\n"
        raw = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _make_server(host: str, port: int, handler: Any) -> ThreadingHTTPServer:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    kind = type("MonitorServer", (ThreadingHTTPServer,), {"address_family": family})
    server: ThreadingHTTPServer = kind((host, port), handler)
    server.daemon_threads = True
    return server
