"""Looks for messages in threads of their own, so that none of them holds a round up.

Flower waits minutes for the rest of an answer whose sender was killed in the middle of it, and one
message that it cannot read costs it all that were fetched with it.
"""

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

from flwr.app import Message

log = logging.getLogger("pliant")

SECONDS = 2.0  # that a look may take before another is begun beside it
MOST = 8  # looks under way at once
_TRANSPORT = ("httpx", "httpcore")  # whose errors are no message's fault


class Looks:
    """Looks for the answers to messages."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._open: list[Future[list[Message]]] = []
        self._is_wary = False  # since a message came that Flower could not read

    def forget(self) -> None:
        """Wait no longer for what was looked for so far."""
        self._open = []

    def messages(self, identities: list[str]) -> list[Message]:
        """Return what has come, without waiting for long; what a look still waits for comes later.

        Flower hands a message out once. Asked again for one that another look is still fetching it
        says that there is none, so its errors count only when no look is under way.
        """
        if len(self._open) < MOST:
            self._open.append(Future())
            arguments = (self._open[-1], identities)
            threading.Thread(target=self._look, args=arguments, daemon=True).start()
        wait(self._open[-1:], SECONDS)
        ended = [look for look in self._open if look.done()]
        self._open = [look for look in self._open if look not in ended]
        found = [message for look in ended for message in look.result()]
        if self._open:
            return [message for message in found if not message.has_error()]
        return sorted(found, key=lambda message: message.has_error())

    def _look(self, found: "Future[list[Message]]", identities: list[str]) -> None:
        try:
            if not self._is_wary:
                found.set_result(self._pulled(identities))
                return
        except BaseException as error:
            if _is_transport(error):
                found.set_exception(error)
                return
            log.warning("a message cannot be read (%s): from now on one by one", type(error))
            self._is_wary = True
        try:
            found.set_result([m for identity in identities for m in self._one(identity)])
        except BaseException as error:
            found.set_exception(error)

    def _one(self, identity: str) -> Iterable[Message]:
        try:
            return self._pulled([identity])
        except Exception as error:
            if _is_transport(error):
                raise
            metadata = SimpleNamespace(reply_to_message_id=identity)
            return [SimpleNamespace(metadata=metadata, has_error=lambda: False, content={})]

    def _pulled(self, identities: list[str]) -> list[Message]:
        return list(self._grid.pull_messages(identities))


def _is_transport(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _TRANSPORT
