"""Poll for replies in separate threads, so that no reply can hold up a round.

If a sender is killed in mid-upload, Flower waits minutes for the rest of its reply. One message
that Flower cannot read costs it all the messages that it pulled together with it.
"""

import logging
import threading
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

from flwr.app import Message

log = logging.getLogger("pliant")

PULL_SECONDS = 2.0  # after which the next pull starts alongside
MAX_PULLS = 8  # in progress at once
_TRANSPORT_MODULES = ("httpx", "httpcore")  # whose errors are not a message's fault


class ReplyPoller:
    """Poll for the replies to messages."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._pulls: list[Future[list[Message]]] = []
        self._needs_single_pulls = False  # once Flower could not read a message

    def reset(self) -> None:
        self._pulls = []

    def poll(self, message_ids: list[str]) -> list[Message]:
        """Return the replies that have arrived; a later call returns those still being pulled.

        Flower delivers a message once. It reports an error for a message that another pull is still
        fetching, so errors count only when no pull is in progress.
        """
        if len(self._pulls) < MAX_PULLS:
            self._pulls.append(Future())
            arguments = (self._pulls[-1], message_ids)
            threading.Thread(target=self._run_pull, args=arguments, daemon=True).start()
        wait(self._pulls[-1:], PULL_SECONDS)
        done = [pull for pull in self._pulls if pull.done()]
        self._pulls = [pull for pull in self._pulls if pull not in done]
        messages = [message for pull in done for message in pull.result()]
        if self._pulls:
            return [message for message in messages if not message.has_error()]
        return sorted(messages, key=lambda message: message.has_error())

    def _run_pull(self, future: "Future[list[Message]]", message_ids: list[str]) -> None:
        try:
            future.set_result(self._pull(message_ids))
        except BaseException as error:
            future.set_exception(error)

    def _pull(self, message_ids: list[str]) -> list[Message]:
        if not self._needs_single_pulls:
            try:
                return list(self._grid.pull_messages(message_ids))
            except Exception as error:
                if _is_transport_error(error):
                    raise
                log.warning(
                    "a message is unreadable (%s); pulling one at a time from now on", type(error)
                )
                self._needs_single_pulls = True
        return [m for message_id in message_ids for m in self._pull_one(message_id)]

    def _pull_one(self, message_id: str) -> list[Message]:
        try:
            return list(self._grid.pull_messages([message_id]))
        except Exception as error:
            if _is_transport_error(error):
                raise
            metadata = SimpleNamespace(reply_to_message_id=message_id)
            return [SimpleNamespace(metadata=metadata, has_error=lambda: False, content={})]


def _is_transport_error(error: BaseException) -> bool:
    return (
        isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _TRANSPORT_MODULES
    )
