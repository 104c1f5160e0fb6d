"""Limit how often each peer may do something."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_PEERS = 1024  # that are remembered


@dataclass
class RateLimit:
    """Allow a burst of events per peer, and a rate after it."""

    per_second: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    _peers: "OrderedDict[str, tuple[float, float]]" = field(default_factory=OrderedDict)

    def allow(self, peer: str) -> bool:
        """Count one event of a peer, and return whether it is within the limit."""
        tokens = self._count_tokens(peer)
        self._peers[peer] = (tokens - 1 if tokens >= 1 else tokens), self.clock()
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return tokens >= 1

    def check(self, peer: str) -> bool:
        """Return whether another event of a peer would be within the limit."""
        return self._count_tokens(peer) >= 1

    def _count_tokens(self, peer: str) -> float:
        now = self.clock()
        tokens, last = self._peers.get(peer, (self.burst, now))
        return min(self.burst, tokens + (now - last) * self.per_second)
