"""Bound what a device reads of a server's responses."""

from collections.abc import Iterator
from typing import Any

import httpx

from pliant.deploy.settings import OBJECT_BYTES


class LimitedTransport(httpx.HTTPTransport):
    """Read no response that is larger than one of Flower's objects, and none that is compressed."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["accept-encoding"] = "identity"
        response = super().handle_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise httpx.DecodingError("expected a response without compression")
        stream: Any = response.stream
        response.stream = _LimitedStream(stream)
        return response


class _LimitedStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for chunk in self._stream:
            size += len(chunk)
            if size > OBJECT_BYTES:
                raise httpx.DecodingError(f"expected a response of at most {OBJECT_BYTES} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()
