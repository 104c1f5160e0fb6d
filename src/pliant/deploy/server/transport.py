"""The transport that a server needs: online devices, requests out, replies in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RawReply:
    """The bytes that a device sent, or the reason why there are none."""

    device: int
    raw: bytes | None
    reason: str = ""


class MessageTransport(Protocol):
    """Connect a server with its devices, which are known by their numbers."""

    @property
    def hello_replies(self) -> Mapping[int, bytes]:
        """Return the devices' replies to the server's hello."""

    def find_online_devices(self) -> set[int]:
        """Return the devices that are reachable now."""

    def send(self, requests: Mapping[int, bytes], *, round: int, seconds: float) -> None:
        """Send each device its request, and stop waiting for replies to earlier ones."""

    def poll_replies(self) -> list[RawReply]:
        """Return the replies since the last call, in any order."""
