"""The floor of a split run: clocks of devices, links and the server, and what each client cost."""

from collections.abc import Callable
from math import inf, isfinite

import numpy as np
from torch import Tensor

from pliant.devices import Fleet, joules
from pliant.devices.draws import FloatArray
from pliant.engine.ledger import TaskRecord
from pliant.engine.split_book import Book
from pliant.split.base import Work
from pliant.split.payload import Payload

Wire = Callable[[int, object], object]  # what becomes of a client's message on its way
_PATIENCE = 1024  # rounds after which a device that stands still is given up
_NUDGE = 1e-9  # of a round's work: whoever can do that is awake


class Hall:
    """Clients side by side in one round of virtual time; times count from the round's start.

    A device sends while it computes on, one message after another. The server takes messages as
    they are handed to it. Everything that a client waits for is counted.
    """

    def __init__(
        self,
        fleet: Fleet,
        full: FloatArray,
        *,
        seed: int,
        start: float,
        leaves: FloatArray,
        server_speed: float | None,
        classes: int,
        owned: list[frozenset[int]],
        largest: float,
        wire: Wire = lambda client, message: message,
        has_gone: Callable[[int], bool] = lambda client: False,
    ) -> None:
        self.fleet, self.full, self.seed, self.start = fleet, full, seed, start
        self.clients = np.arange(len(full))
        self.speeds = np.full(len(full), fleet.macs_per_second or 0.0)
        if fleet.macs_per_second is None:
            self.speeds = full / fleet.round_seconds
        self.traits = fleet.traits(self.clients, seed=seed)
        self.leaves, self.server_speed = leaves, server_speed
        self.wire, self.has_gone = wire, has_gone
        self.book = Book(classes, owned, largest)
        self.accounts = self.book.accounts
        self.is_known = np.zeros(len(full), np.bool_)  # has been here in this round
        self.now = np.zeros(len(full))
        self.radio = np.zeros(len(full))  # when the link up is free
        self.arrival = np.zeros(len(full))
        self.ready = np.zeros(len(full))  # when the server is through with a client's message
        self.server_free = 0.0
        self._horizon(4 * fleet.round_seconds)

    def _horizon(self, length: float) -> None:
        self.length = length
        path = self.fleet.path(self.clients, self.start, length, seed=self.seed)
        path = path.scaled(self.speeds)
        self.paths = [path.rows(np.array([client])) for client in self.clients]
        # a speed that stays put needs no search in a path
        self.steady = [
            float(own.levels[0, 0]) if own.levels.shape[1] == 1 else None for own in self.paths
        ]

    # Floor

    def present(self) -> list[int]:
        here, everyone = self._here(), self.clients.tolist()
        if not here:  # let time pass until somebody wakes
            wake = [self._finish(client, _NUDGE * float(self.full[client])) for client in everyone]
            wake = [t if t < self.leaves[c] else inf for c, t in enumerate(wake)]
            if not isfinite(min(wake)):
                return []
            for client in everyone:
                self._wait(client, min(wake))
            here = self._here()
        for client in here:
            self.is_known[client] = True
        return here

    def share(self, client: int, macs: float) -> float:
        return self._speed(client) * self.fleet.round_seconds / float(self.full[client])

    def strain(self, client: int, macs: float, sent: int) -> float:
        traits, full = self.traits, float(self.speeds[client])
        link = float(traits.latency[client]) + sent / float(traits.up[client])
        now = max(self._speed(client), _NUDGE * full)
        return (macs / now + link) / (macs / full + link)

    def compute(self, client: int, work: Work) -> bool:
        account = self.accounts[client]
        begin = float(self.now[client])
        end = self._finish(client, work.macs)
        stop = min(end, float(self.leaves[client]))
        if not isfinite(end) or end > self.leaves[client]:
            account.has_left = True
            if isfinite(stop) and stop > begin:
                done = self.paths[client].work(np.array([stop])) - self.paths[client].work(
                    np.array([begin])
                )
                account.macs += float(done[0])
                account.busy += stop - begin
                self.now[client] = stop
            return False
        self.now[client] = end
        account.macs += work.macs
        account.forward += work.forward
        account.samples += work.samples
        account.steps += work.samples > 0
        account.busy += end - begin
        return True

    def send(
        self, client: int, message: object | None, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        if message is None:
            self._upload(client, self.book.size(None, shape, payload))
            self.book.suppose(client, shape)
            return None
        arrived = self.wire(client, message)
        self._upload(client, self.book.size(arrived, shape, payload))
        return self.book.receive(client, arrived, shape, payload)

    def serve(self, client: int, work: Work) -> None:
        begin = max(self.server_free, float(self.arrival[client]))
        self.server_free = begin + (work.macs / self.server_speed if self.server_speed else 0.0)
        self.ready[client] = self.server_free
        self.accounts[client].server += work.forward

    def give_back(self, client: int, size: int, *, dense: int, nonzero: int) -> None:
        account = self.accounts[client]
        account.down += size
        account.dense += dense
        account.nonzero += nonzero
        travel = float(self.traits.latency[client]) + size / float(self.traits.down[client])
        self._wait(client, float(self.ready[client]) + travel)

    def hand_over(self, giver: int, taker: int, size: int) -> None:
        self._upload(giver, size)
        self.accounts[giver].relayed += size
        self.accounts[taker].down += size
        travel = float(self.traits.latency[taker]) + size / float(self.traits.down[taker])
        self._wait(taker, float(self.arrival[giver]) + travel)

    def collect(self, clients: list[int], size: int) -> None:
        for client in clients:
            self._upload(client, size)
            self.accounts[client].relayed += size
            self.accounts[client].down += size
        merged = max(float(self.arrival[client]) for client in clients)
        for client in clients:
            travel = float(self.traits.latency[client]) + size / float(self.traits.down[client])
            self._wait(client, merged + travel)

    def gather(self) -> None:
        here = [client for client in self.clients.tolist() if self._counts(client)]
        if here:
            last = max(self.server_free, float(self.now[here].max()), float(self.ready[here].max()))
            for client in here:  # who is next is told by a message
                self._wait(client, last + float(self.traits.latency[client]))

    def refuse(self, client: int, why: str) -> None:
        self.accounts[client].refused[why] += 1

    def note(self, client: int, loss: float) -> None:
        self.accounts[client].losses.append(loss)

    # the round's end

    def close(self) -> float:
        """Return when the round is over."""
        known = np.flatnonzero(self.is_known)
        if not len(known):
            return self.fleet.round_seconds  # nobody came: the server waits for the next one
        return max(self.server_free, float(self.now[known].max()), float(self.radio[known].max()))

    def records(self, number: int) -> list[TaskRecord]:
        """Return what each client that was here has cost, and how it ended."""
        close = self.close()
        if close > self.length:
            self._horizon(2 * close)
        energy = joules(
            self.traits,
            np.array([account.macs for account in self.accounts]),
            np.array([float(account.up + account.down) for account in self.accounts]),
        )
        found = []
        for client in np.flatnonzero(self.is_known).tolist():
            self._counts(client)  # one may have gone after its last mini-batch
            available = float(self.paths[client].work(np.array([close]))[0])
            found.append(self.book.record(number, client, available, float(energy[client])))
        return found

    # clocks

    def _here(self) -> list[int]:
        return [c for c in self.clients.tolist() if self._counts(c) and self._speed(c) > 0]

    def _counts(self, client: int) -> bool:
        account = self.accounts[client]
        account.has_left |= self.has_gone(client)
        return not account.has_left and bool(self.now[client] < self.leaves[client])

    def _speed(self, client: int) -> float:
        steady = self.steady[client]
        if steady is not None:
            return steady
        while self.now[client] > self.length:
            self._horizon(2 * self.length)
        return float(self.paths[client].speed(self.now[client : client + 1])[0])

    def _finish(self, client: int, macs: float) -> float:
        steady = self.steady[client]
        if steady:
            return float(self.now[client]) + macs / steady
        while True:
            at = self.now[client : client + 1]
            end = float(self.paths[client].finish(at, np.array([macs]))[0])
            is_over = self.length > self.now[client] + _PATIENCE * self.fleet.round_seconds
            if isfinite(end) or is_over:
                return end
            self._horizon(2 * self.length)

    def _upload(self, client: int, size: int) -> None:
        begin = max(float(self.now[client]), float(self.radio[client]))
        self.radio[client] = begin + size / float(self.traits.up[client])
        self.arrival[client] = self.radio[client] + float(self.traits.latency[client])
        self.accounts[client].up += size

    def _wait(self, client: int, until: float) -> None:
        ahead = until - float(self.now[client])
        if ahead > 0:
            self.accounts[client].waited += ahead
            self.now[client] = until
