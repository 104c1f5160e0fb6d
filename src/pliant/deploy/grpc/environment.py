"""The environment of a split round on real devices: wall clock and measured times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from msgspec.structs import replace

from pliant.deploy.grpc.remote_client import RemoteClient
from pliant.devices import Fleet
from pliant.devices.vector_rng import FloatArray
from pliant.engine.ledger import TaskRecord
from pliant.engine.split_ledger import build_task_records
from pliant.split.base import ClientCosts

RECENT_BATCHES = 3  # their median gives a device's current speed


@dataclass
class WallClockEnvironment:
    """Run devices in parallel for one round of real time.

    Bytes are those of all frames, and what carries them, counted by the server; it counts MACs
    itself. Only seconds are reported by the devices, capped at the length of the round.
    """

    fleet: Fleet
    round_macs: FloatArray  # of each client
    clients: dict[int, RemoteClient]
    seed: int
    selected: Sequence[int]
    clock: Callable[[], float] = time.monotonic
    deadline: float | None = None  # seconds after which no mini-batch starts; None: wait for all

    def __post_init__(self) -> None:
        self.costs = [ClientCosts() for _ in self.clients]
        self._participants: set[int] = set()
        self._batch_macs: dict[int, list[float]] = {client: [] for client in self.clients}
        self._open_batches: dict[int, tuple[float, int]] = {}  # MACs and samples, not charged yet
        self._best_speeds: dict[int, float] = {}
        self._start = self.clock()
        self._stopped: set[int] = set()  # by the deadline
        for remote in self.clients.values():
            channel, seconds = remote.channel, self.deadline
            channel.deadline = None if seconds is None else self._start + seconds + channel.timeout

    def available_clients(self) -> list[int]:
        available = [client for client in self.selected if self._is_available(client)]
        self._participants.update(available)
        return available

    def affordable_share(self, client: int) -> float:
        speed = self._measure_speed(client)
        if speed is None:
            return 1.0
        return speed * self.fleet.round_seconds / float(self.round_macs[client])

    def slowdown(self, client: int, macs: float, upload_bytes: int) -> float:
        speed = self._measure_speed(client)
        return 1.0 if speed is None else self._best_speeds[client] / speed

    def compute(self, client: int, macs: float, samples: int) -> bool:
        if not self._is_available(client):
            return False
        if samples and self.deadline is not None and self.seconds_elapsed() > self.deadline:
            self._stopped.add(client)
            return False
        self._charge_batch(client)
        if samples:
            self._open_batches[client] = macs, samples
            self._batch_macs[client].append(macs)
        else:
            self._batch_macs[client][-1] += macs
            self.costs[client].add_pass(macs, samples)
        return True

    def upload(self, client: int, size: int) -> None:
        self._charge_batch(client)

    # Links and the server take the time that they take. A late device is waited for when its
    # message is needed.

    def serve(self, clients: Sequence[int], macs: float) -> None:
        self._participants.update(clients)  # one whose activations are kept may be absent

    def download(self, client: int, size: int) -> None: ...

    def transfer(
        self, senders: Sequence[int], receivers: Sequence[int], sizes: Mapping[int, int]
    ) -> None:
        self._participants.update(senders)  # one that only passes its part on pays for it too

    def barrier(self) -> None: ...

    def seconds_elapsed(self) -> float:
        return self.clock() - self._start

    def build_records(self, round_number: int) -> list[TaskRecord]:
        for client in self.available_clients():
            if self.clients[client].channel.wait_for_all_replies():
                self._charge_batch(client)
        for remote in self.clients.values():
            remote.channel.deadline = None  # parts are saved after the round
        length = max(self.seconds_elapsed(), 1e-9)
        available_macs = {}
        for client in sorted(self._participants):
            costs, remote = self.costs[client], self.clients[client]
            remote.report_problems(costs)
            costs.busy = min(sum(remote.channel.batch_seconds), length)
            costs.waited = costs.idle = length - costs.busy  # transfers are not measured
            costs.has_left = client in self._stopped or not self._is_available(client)
            available_macs[client] = costs.macs * length / costs.busy if costs.busy else costs.macs
        device_costs = self.fleet.get_costs(np.arange(len(self.costs)), seed=self.seed)
        return build_task_records(round_number, self.costs, available_macs, device_costs)

    def charge_control(self, records: list[TaskRecord]) -> list[TaskRecord]:
        """Add to each record the bytes since the last round that its exchanges do not explain."""
        charged = []
        for record in records:
            traffic = self.clients[record.device].channel.take_traffic()
            control = max(0, traffic - record.down - record.up)
            charged.append(replace(record, control=control))
        return charged

    def charge_tests(self, formula_bytes: int) -> int:
        return sum(remote.channel.take_test_traffic() for remote in self.clients.values())

    def _is_available(self, client: int) -> bool:
        return self.clients[client].channel.is_in_round and not self.costs[client].has_left

    def _charge_batch(self, client: int) -> None:
        """Charge the open mini-batch, once it is known to be computed."""
        if client in self._open_batches:
            self.costs[client].add_pass(*self._open_batches.pop(client))

    def _measure_speed(self, client: int) -> float | None:
        """Return a device's current MAC/s from its last mini-batches; None before the first."""
        times = self.clients[client].channel.batch_seconds
        if not times:
            return None
        recent_macs = self._batch_macs[client][: len(times)][-RECENT_BATCHES:]
        pairs = zip(recent_macs, times[-RECENT_BATCHES:], strict=False)
        speed = median(macs / seconds for macs, seconds in pairs)
        self._best_speeds[client] = max(speed, self._best_speeds.get(client, 0.0))
        return speed
