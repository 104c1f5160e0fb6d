"""One thread with an event loop, in which a process serves all its gRPC streams."""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

R = TypeVar("R")


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pliant-grpc", daemon=True).start()
    return loop


def run_in_loop(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in the loop's thread, and wait for its result in this one."""
    return asyncio.run_coroutine_threadsafe(coroutine, _start_loop()).result()
