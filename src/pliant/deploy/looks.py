"""Looks for messages in threads of their own, so that none of them holds a round up.

Flower waits minutes for the rest of an answer whose sender was killed in the middle of it.
"""

import threading
from concurrent.futures import Future, wait
from typing import Any

from flwr.app import Message

SECONDS = 2.0  # that a look may take before another is begun beside it
MOST = 8  # looks under way at once


class Looks:
    """Looks for the answers to messages that were sent together."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._open: list[Future[list[Message]]] = []

    def messages(self, identities: list[str]) -> list[Message]:
        """Return what has come, without waiting for long; what a look still waits for comes later.

        Flower hands a message out once. Asked again for one that another look is still fetching it
        says that there is none, so its errors count only when no look is under way.
        """
        if len(self._open) < MOST:
            self._open.append(Future())
            arguments = (self._open[-1], self._grid, identities)
            threading.Thread(target=_look, args=arguments, daemon=True).start()
        wait(self._open[-1:], SECONDS)
        ended = [look for look in self._open if look.done()]
        self._open = [look for look in self._open if look not in ended]
        found = [message for look in ended for message in look.result()]
        if self._open:
            return [message for message in found if not message.has_error()]
        return sorted(found, key=lambda message: message.has_error())


def _look(found: "Future[list[Message]]", grid: Any, identities: list[str]) -> None:
    try:
        found.set_result(list(grid.pull_messages(identities)))
    except BaseException as error:
        found.set_exception(error)
