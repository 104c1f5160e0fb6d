"""Serve the dashboard: one page, its data as JSON, and updates as server-sent events.

The page sends back the id of its last event, which encodes what it knows; a restarted server reads
the files once and resumes from there.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pliant.dashboard.auth import AuthMiddleware
from pliant.dashboard.fleet_view import FleetViews, describe_fleet, is_news
from pliant.dashboard.run_index import RunIndex
from pliant.dashboard.run_view import RunView
from pliant.dashboard.search_view import SearchView
from pliant.deploy.server.fleet_status import FleetStatus

POLL_SECONDS = 0.5  # between scans of unfinished runs
FULL_SCAN_EVERY = 8  # every n-th scan walks the whole folder
MAX_SELECTED_RUNS = 64  # per page
T = TypeVar("T")


class RunWatcher:
    """The index of runs with its last scan, shared by all pages."""

    def __init__(self, folder: Path, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.index = RunIndex(folder)
        self.fleets = FleetViews(folder)
        self.is_stopping = is_stopping
        self.epoch = token_hex(4)  # versions are only valid within one server process
        self._lock = asyncio.Lock()
        self._scan_count = 0
        self._last_scan = -POLL_SECONDS

    async def refresh(self) -> None:
        """Scan again, unless the last scan was a moment ago."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._last_scan < POLL_SECONDS / 2:
                return
            is_full = self._scan_count % FULL_SCAN_EVERY == 0
            self._scan_count += 1
            await asyncio.to_thread(self.index.scan, full=is_full)
            self._last_scan = asyncio.get_running_loop().time()

    async def run_exclusively(self, function: Callable[[], T]) -> T:
        """Run a function in a thread with exclusive access to the index."""
        async with self._lock:
            return await asyncio.to_thread(function)

    async def read_all(self, view: RunView | SearchView) -> None:
        """Read a view's file to its end, chunk by chunk, so that other pages are served between."""
        while await self.run_exclusively(view.read_more):
            pass


def make_app(
    folder: Path, token: str | None = None, is_stopping: Callable[[], bool] = lambda: False
) -> Starlette:
    """Make the dashboard of a folder; with a token, only requests that carry it are served.

    Pages listen indefinitely: `is_stopping` tells them when the server wants to stop.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a folder of runs")
    watcher = RunWatcher(folder, is_stopping)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        first_scan = asyncio.create_task(watcher.refresh())  # before the first request
        yield
        first_scan.cancel()

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/api/runs", partial(_serve_runs, watcher)),
            Route("/api/stream", partial(_serve_stream, watcher)),
            Route("/api/timeline", partial(_serve_timeline, watcher)),
            Route("/api/config", partial(_serve_config, watcher)),
            Mount("/", StaticFiles(packages=[("pliant.dashboard", "static")], html=True)),
        ],
        middleware=[Middleware(AuthMiddleware, token=token)],
    )


async def _serve_runs(watcher: RunWatcher, request: Request) -> Response:
    await watcher.refresh()
    return _make_json_response(_list_runs(watcher, 0))


async def _serve_stream(watcher: RunWatcher, request: Request) -> Response:
    names = request.query_params.getlist("run")[:MAX_SELECTED_RUNS]
    last_event_id = request.headers.get("last-event-id") or request.query_params.get("since", "")
    return StreamingResponse(
        _stream_events(watcher, names, last_event_id),
        headers={"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"},
    )


async def _serve_timeline(watcher: RunWatcher, request: Request) -> Response:
    query = request.query_params
    last, count = _parse_number(query.get("last"), 1 << 40), _parse_number(query.get("count"), 3)
    try:
        view = watcher.index.get_view(query.get("run", ""))
        if isinstance(view, SearchView):
            raise LookupError("a search has no timeline")
        await watcher.read_all(view)
        timeline = await watcher.run_exclusively(partial(view.read_timeline, last, min(count, 12)))
        return _make_json_response(timeline)
    except (LookupError, OSError):
        return Response("404: no such run\n", status_code=404)


async def _serve_config(watcher: RunWatcher, request: Request) -> Response:
    try:
        return _make_json_response(watcher.index.read_config(request.query_params.get("run", "")))
    except LookupError:
        return Response("404: no such run\n", status_code=404)


def _parse_number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else default


def _make_json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _list_runs(watcher: RunWatcher, since: int) -> dict[str, Any]:
    index = watcher.index
    runs = index.list_summaries(since)
    return {"since": f"{watcher.epoch}.{index.version}.", "count": len(index), "runs": runs}


async def _stream_events(
    watcher: RunWatcher, names: Sequence[str], last_event_id: str
) -> AsyncIterator[bytes]:
    """Yield events for one page, as long as it listens.

    An event id consists of the server's epoch, the version of the list, and how many rounds of each
    run the page knows.
    """
    epoch, version, counts = _parse_event_id(watcher, last_event_id, len(names))
    known_counts = dict(zip(names, counts, strict=True))
    known_fleets: dict[str, FleetStatus] = {}
    yield b"retry: 1000\n\n"
    idle_polls = 0
    while not watcher.is_stopping():
        await watcher.refresh()
        idle_polls += 1
        if watcher.index.version > version or not epoch:
            runs = _list_runs(watcher, version)
            version, epoch = watcher.index.version, watcher.epoch
            yield _format_event("runs", runs, _format_event_id(watcher, version, known_counts))
            idle_polls = 0
        for name in names:
            async for kind, message in _iter_updates(watcher, name, known_counts):
                yield _format_event(kind, message, _format_event_id(watcher, version, known_counts))
                idle_polls = 0
            fleet = await _find_fleet_news(watcher, name, known_fleets)
            if fleet is not None:
                message = {"run": name} | describe_fleet(fleet)
                event_id = _format_event_id(watcher, version, known_counts)
                yield _format_event("fleet", message, event_id)
                idle_polls = 0
        if idle_polls % 30 == 29:
            yield b": still here\n\n"  # detects a page that is gone
        await asyncio.sleep(POLL_SECONDS)


async def _iter_updates(
    watcher: RunWatcher, name: str, known_counts: dict[str, int]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield what the page does not know of a run, once its file was read to the end."""
    try:
        view = watcher.index.get_view(name)
        await watcher.read_all(view)
    except (LookupError, OSError):
        return
    update = await watcher.run_exclusively(partial(_collect_update, view, known_counts[name]))
    if update["from"] != known_counts[name] or update["from"] < update["known"]:
        known_counts[name] = update["known"]
        yield "front" if isinstance(view, SearchView) else "rounds", {"run": name} | update


async def _find_fleet_news(
    watcher: RunWatcher, name: str, known_fleets: dict[str, FleetStatus]
) -> FleetStatus | None:
    """Return the status of a deployment's devices if the page does not know it."""
    if name not in watcher.index:
        return None
    try:
        while await watcher.run_exclusively(partial(watcher.fleets.read_more, name)):
            pass
        fleet = await watcher.run_exclusively(partial(watcher.fleets.read, name))
    except (LookupError, OSError, ValueError):  # damaged, or being deleted
        return None
    if fleet is None or not is_news(fleet, known_fleets.get(name)):
        return None
    known_fleets[name] = fleet
    return fleet


def _collect_update(view: RunView | SearchView, known_count: int) -> dict[str, Any]:
    """Return what is new after `known_count` rounds; all if the run went back to a checkpoint."""
    first = 0 if known_count > len(view) else known_count
    update = {"from": first, "known": len(view)}
    if isinstance(view, SearchView):
        return update | view.get_front_data()
    return update | {"columns": view.get_columns_since(first)}


def _parse_event_id(watcher: RunWatcher, event_id: str, count: int) -> tuple[str, int, list[int]]:
    epoch, _, rest = event_id.partition(".")
    version, _, listed = rest.partition(".")
    counts = [_parse_number(part, 0) for part in listed.split("-")] if listed else []
    counts = counts if len(counts) == count else [0] * count
    if epoch != watcher.epoch:  # resend the list, but only new rounds of the runs
        return "", 0, counts
    return epoch, _parse_number(version, 0), counts


def _format_event_id(watcher: RunWatcher, version: int, known_counts: dict[str, int]) -> str:
    return f"{watcher.epoch}.{version}." + "-".join(map(str, known_counts.values()))


def _format_event(kind: str, value: Any, event_id: str) -> bytes:
    return (
        f"event: {kind}\nid: {event_id}\ndata: {msgspec.json.encode(value).decode()}\n\n".encode()
    )
