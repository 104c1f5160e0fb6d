"""The floor of a split round on real devices: the wall clock, and devices' own times."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from torch import Tensor

from pliant.deploy.split_remote import Remote
from pliant.devices import Fleet, joules
from pliant.devices.draws import FloatArray
from pliant.engine.ledger import TaskRecord
from pliant.engine.split_book import Book
from pliant.split.base import Work
from pliant.split.payload import Payload

RECENT = 3  # mini-batches whose median tells how fast a device is now


class LiveFloor:
    """Devices side by side in one round of real time.

    Bytes are those of activations, gradients and parts as they are encoded; MACs are counted, not
    reported. Only seconds are a device's own claim, and never more than the round has lasted.
    """

    def __init__(
        self,
        fleet: Fleet,
        full: FloatArray,  # MACs of each client's round
        remotes: dict[int, Remote],
        book: Book,
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._full, self._remotes, self._book = fleet, full, remotes, book
        self._seed, self._clock = seed, clock
        self._accounts = book.accounts
        self._known: set[int] = set()
        self._macs: dict[int, list[float]] = {client: [] for client in remotes}
        self._open: dict[int, Work] = {}  # begun, and nothing has come of it yet
        self._best: dict[int, float] = {}
        self._start = clock()

    # Floor

    def present(self) -> list[int]:
        here = [client for client in self._remotes if self._is_here(client)]
        self._known |= set(here)
        return here

    def share(self, client: int, macs: float) -> float:
        speed = self._speed(client)
        if speed is None:
            return 1.0
        return speed * self._fleet.round_seconds / float(self._full[client])

    def strain(self, client: int, macs: float, sent: int) -> float:
        speed = self._speed(client)
        return 1.0 if speed is None else self._best[client] / speed

    def compute(self, client: int, work: Work) -> bool:
        if not self._is_here(client):
            return False
        self._settle(client)
        if work.samples:
            self._open[client] = work
            self._macs[client].append(work.macs)
        else:
            self._macs[client][-1] += work.macs
            self._accounts[client].macs += work.macs
        return True

    def send(
        self, client: int, message: object | None, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        self._settle(client)
        self._accounts[client].up += self._book.size(message, shape, payload)
        return self._book.receive(client, message, shape, payload)

    def serve(self, client: int, work: Work) -> None:
        self._accounts[client].server += work.forward

    def give_back(self, client: int, size: int, *, dense: int, nonzero: int) -> None:
        account = self._accounts[client]
        account.down += size
        account.dense += dense
        account.nonzero += nonzero

    def hand_over(self, giver: int, taker: int, size: int) -> None:
        self._accounts[giver].up += size
        self._accounts[giver].relayed += size
        self._accounts[taker].down += size

    def collect(self, clients: list[int], size: int) -> None:
        for client in clients:
            self.hand_over(client, client, size)

    def gather(self) -> None:
        """Go on at once: whoever sends late is waited for when it is asked for."""

    def refuse(self, client: int, why: str) -> None:
        self._accounts[client].refused[why] += 1

    def note(self, client: int, loss: float) -> None:
        self._accounts[client].losses.append(loss)

    # the round's end

    def close(self) -> float:
        """Return how long the round has lasted."""
        return self._clock() - self._start

    def records(self, number: int) -> list[TaskRecord]:
        """Return what each device that was here has cost, and how it ended."""
        for client in self.present():
            if self._remotes[client].line.settled():  # who is ahead waits for the others
                self._settle(client)
        length = max(self.close(), 1e-9)
        found = []
        for client in sorted(self._known):
            account, remote = self._accounts[client], self._remotes[client]
            account.refused.update(remote.complaints)
            remote.complaints.clear()
            account.busy = min(sum(remote.line.times), length)
            account.waited = length - account.busy
            account.has_left = not self._is_here(client)
            available = account.macs * length / account.busy if account.busy else account.macs
            sent = np.array([float(account.up + account.down)])
            traits = self._fleet.traits(np.array([client]), seed=self._seed)
            energy = float(joules(traits, np.array([account.macs]), sent)[0])
            found.append(self._book.record(number, client, available, energy))
        return found

    def _is_here(self, client: int) -> bool:
        return self._remotes[client].line.is_in and not self._accounts[client].has_left

    def _settle(self, client: int) -> None:
        """Charge a mini-batch once something has come of it."""
        work = self._open.pop(client, None)
        if work is not None:
            account = self._accounts[client]
            account.macs += work.macs
            account.forward += work.forward
            account.samples += work.samples
            account.steps += 1

    def _speed(self, client: int) -> float | None:
        """Return a device's MAC/s now, by its last mini-batches; None before the first."""
        times = self._remotes[client].line.times
        last = len(times)
        if not last:
            return None
        pairs = zip(self._macs[client][:last][-RECENT:], times[-RECENT:], strict=False)
        speed = median(macs / seconds for macs, seconds in pairs)
        self._best[client] = max(speed, self._best.get(client, 0.0))
        return speed
