"""The standard health service of gRPC, `grpc.health.v1.Health`, for probes and load balancers.

Its two messages have one field each, so they are read and written by hand: the library for it would
read whatever a stranger sends, and let any number of strangers watch.
"""

import asyncio
from contextlib import suppress
from typing import Any

from pliant.deploy.grpc.handshake import GRPC_SERVICE

HEALTH_SERVICE = "grpc.health.v1.Health"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"  # field 1, a number
MAX_NAME_BYTES = 100
MAX_WATCHERS = 16
REQUEST_SECONDS = 3.0  # for a request to arrive


class HealthService:
    """Say whether the server serves devices."""

    def __init__(self, grpc: Any) -> None:
        self._grpc = grpc
        self._is_serving = False
        self._watchers: set[asyncio.Event] = set()
        functions = {"Check": self._check, "Watch": self._watch}
        handlers = {  # a call with one message is a stream to its end
            name: grpc.stream_stream_rpc_method_handler(function)
            for name, function in functions.items()
        }
        self.handler = grpc.method_handlers_generic_handler(HEALTH_SERVICE, handlers)

    def set_serving(self, is_serving: bool) -> None:
        """Change the status; call this in the event loop."""
        self._is_serving = is_serving
        for watcher in self._watchers:
            watcher.set()

    async def _check(self, _: Any, context: Any) -> None:
        status = self._get_status(await self._read_name(context))
        if status == SERVICE_UNKNOWN:
            await context.abort(self._grpc.StatusCode.NOT_FOUND, "expected another service")
        await context.write(status)

    async def _watch(self, _: Any, context: Any) -> None:
        if len(self._watchers) >= MAX_WATCHERS:
            reason = f"expected at most {MAX_WATCHERS} watchers"
            await context.abort(self._grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            name, last = await self._read_name(context), b""
            while last != NOT_SERVING:  # which is the end
                if last != (last := self._get_status(name)):
                    await context.write(last)
                    continue
                await news.wait()
                news.clear()
        finally:
            self._watchers.discard(news)

    def _get_status(self, name: bytes) -> bytes:
        if name not in (b"", GRPC_SERVICE.encode()):
            return SERVICE_UNKNOWN
        return SERVING if self._is_serving else NOT_SERVING

    async def _read_name(self, context: Any) -> bytes:
        """Return the service that a request asks for."""
        request: Any = None
        with suppress(TimeoutError):
            request = await asyncio.wait_for(context.read(), REQUEST_SECONDS)
        name: bytes = request[2:] if isinstance(request, bytes) else b""
        is_valid = len(name) <= MAX_NAME_BYTES and request in (b"", bytes((10, len(name))) + name)
        if not is_valid:  # field 1, a text
            reason = "expected a HealthCheckRequest"
            await context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, reason)
        return name
