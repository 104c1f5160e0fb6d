"""What the server needs of a transport: who is there, letters out, replies in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reply:
    """What came from a device: bytes, or why there are none."""

    device: int
    raw: bytes | None
    reason: str = ""


class Link(Protocol):
    """A server's connection with its devices, by their numbers."""

    @property
    def greetings(self) -> Mapping[int, bytes]:
        """Return what each device said of itself when it came."""

    def online(self) -> set[int]:
        """Return the devices that can be reached."""

    def send(self, letters: Mapping[int, bytes], *, round: int, seconds: float) -> None:
        """Send each device its letter; forget what was asked before."""

    def replies(self) -> list[Reply]:
        """Return what has come since the last time, in no order."""
