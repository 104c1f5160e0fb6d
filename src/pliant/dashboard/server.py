"""The server of the dashboard: one page, its data as JSON, and news as server-sent events.

The page says how much it knows, in the id of the last event that it got; a server that was started
anew reads the files once and goes on from there.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pliant.dashboard.door import Door
from pliant.dashboard.fold import Fold
from pliant.dashboard.shelf import Shelf
from pliant.dashboard.trials import Search

PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/timeline.js": ("timeline.js", "text/javascript; charset=utf-8"),
}
PAUSE = 0.5  # seconds between looks at runs that go on
WALK = 8  # looks between walks through the whole folder
TICKED = 32  # runs of one page
T = TypeVar("T")


class News:
    """The shelf and when it was last looked at; many pages share one look."""

    def __init__(self, folder: Path, is_over: Callable[[], bool] = lambda: False) -> None:
        self.shelf = Shelf(folder)
        self.is_over = is_over
        self.epoch = token_hex(4)  # versions of another server mean nothing here
        self._lock = asyncio.Lock()
        self._looks = 0
        self._last = -PAUSE

    async def refresh(self) -> None:
        """Look again, unless that was done a moment ago."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._last < PAUSE / 2:
                return
            is_walk = self._looks % WALK == 0
            self._looks += 1
            await asyncio.to_thread(self.shelf.scan, anew=is_walk)
            self._last = asyncio.get_running_loop().time()

    async def alone(self, work: Callable[[], T]) -> T:
        """Do something with what the shelf holds, in a thread, while nobody else does."""
        async with self._lock:
            return await asyncio.to_thread(work)

    async def caught_up(self, fold: Fold | Search) -> None:
        """Read all that is there, part by part: others are served in between."""
        while await self.alone(fold.feed):
            pass


def application(
    folder: Path, token: str | None = None, is_over: Callable[[], bool] = lambda: False
) -> Starlette:
    """Return the dashboard of a folder; with a token only those who show it are let in.

    Pages listen for as long as they like: `is_over` tells when the server wants to end.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a folder of runs")
    news = News(folder, is_over)
    static = files("pliant.dashboard").joinpath("static")
    pages = {
        path: (static.joinpath(name).read_bytes(), kind) for path, (name, kind) in PAGES.items()
    }

    async def page(request: Request) -> Response:
        body, kind = pages[request.url.path]
        return Response(body, headers={"content-type": kind})

    async def runs(request: Request) -> Response:
        await news.refresh()
        return _json(_list(news, 0))

    async def stream(request: Request) -> Response:
        names = request.query_params.getlist("run")[:TICKED]
        known = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return StreamingResponse(
            _events(news, names, known),
            headers={"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"},
        )

    async def timeline(request: Request) -> Response:
        query = request.query_params
        last, count = (
            _number(query.get(key), usual) for key, usual in (("last", 1 << 40), ("count", 3))
        )
        try:
            fold = news.shelf.fold(query.get("run", ""))
            if isinstance(fold, Search):
                raise LookupError("a search has no timeline")
            await news.caught_up(fold)
            return _json(await news.alone(partial(fold.timeline, last, min(count, 12))))
        except (LookupError, OSError):
            return Response("404: no such run\n", status_code=404)

    async def config(request: Request) -> Response:
        try:
            return _json(news.shelf.config(request.query_params.get("run", "")))
        except LookupError:
            return Response("404: no such run\n", status_code=404)

    @asynccontextmanager
    async def begun(app: Starlette) -> AsyncIterator[None]:
        first = asyncio.create_task(news.refresh())  # before the first page asks
        yield
        first.cancel()

    return Starlette(
        lifespan=begun,
        routes=[
            *(Route(path, page) for path in PAGES),
            Route("/api/runs", runs),
            Route("/api/stream", stream),
            Route("/api/timeline", timeline),
            Route("/api/config", config),
        ],
        middleware=[Middleware(Door, token=token)],
    )


def _number(text: str | None, usual: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else usual


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _list(news: News, since: int) -> dict[str, Any]:
    shelf = news.shelf
    runs = shelf.summaries(since)
    return {"since": f"{news.epoch}.{shelf.version}.", "count": len(shelf), "runs": runs}


async def _events(news: News, names: Sequence[str], known: str) -> AsyncIterator[bytes]:
    """Yield events for one page, for as long as it listens.

    An id is the server's epoch, the version of the list, and how many rounds of each run are known.
    """
    epoch, version, counts = _parsed(news, known, len(names))
    places = dict(zip(names, counts, strict=True))
    yield b"retry: 1000\n\n"
    quiet = 0
    while not news.is_over():
        await news.refresh()
        told = False
        if news.shelf.version > version or not epoch:
            listed = _list(news, version)
            version, epoch = news.shelf.version, news.epoch
            yield _event("runs", listed, _id(news, version, places))
            told = True
        for name in names:
            async for kind, message in _grown(news, name, places):
                yield _event(kind, message, _id(news, version, places))
                told = True
        quiet = 0 if told else quiet + 1
        if quiet % 30 == 29:
            yield b": still here\n\n"  # a page that is gone is noticed by this
        await asyncio.sleep(PAUSE)


async def _grown(
    news: News, name: str, places: dict[str, int]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield what is new of one run; of a long file the last part comes when all was read."""
    try:
        fold = news.shelf.fold(name)
        await news.caught_up(fold)
    except (LookupError, OSError):
        return
    known, told = await news.alone(partial(_since, fold, places[name]))
    if known != places[name] or known < told["known"]:
        places[name] = told["known"]
        yield "front" if isinstance(fold, Search) else "rounds", {"run": name} | told


def _since(fold: Fold | Search, known: int) -> tuple[int, dict[str, Any]]:
    """Return what is new and from where on: from 0 if a run went back to its last checkpoint."""
    known = 0 if known > len(fold) else known
    news = fold.shown() if isinstance(fold, Search) else {"columns": fold.since(known)}
    return known, {"from": known, "known": len(fold)} | news


def _parsed(news: News, known: str, count: int) -> tuple[str, int, list[int]]:
    epoch, _, rest = known.partition(".")
    version, _, listed = rest.partition(".")
    counts = [_number(part, 0) for part in listed.split("-")] if listed else []
    counts = counts if len(counts) == count else [0] * count
    if epoch != news.epoch:  # the list comes anew; of the runs only what is new
        return "", 0, counts
    return epoch, _number(version, 0), counts


def _id(news: News, version: int, places: dict[str, int]) -> str:
    return f"{news.epoch}.{version}." + "-".join(map(str, places.values()))


def _event(kind: str, value: Any, identity: str) -> bytes:
    return b"event: %b\nid: %b\ndata: %b\n\n" % (
        kind.encode(),
        identity.encode(),
        msgspec.json.encode(value),
    )
