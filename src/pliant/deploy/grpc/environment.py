"""The environment of a split round on real devices: wall clock and measured times."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from torch import Tensor

from pliant.deploy.grpc.remote_client import RemoteClient
from pliant.devices import Fleet, compute_joules
from pliant.devices.vector_rng import FloatArray
from pliant.engine.ledger import TaskRecord
from pliant.engine.split_ledger import ClientLedger
from pliant.split.base import SplitStepCost
from pliant.split.payload import Payload

RECENT_BATCHES = 3  # their median gives a device's current speed


class WallClockEnvironment:
    """Run devices in parallel for one round of real time.

    Bytes are those of the encoded activations, gradients and parts; the server counts MACs itself.
    Only seconds are reported by the devices, capped at the length of the round.
    """

    def __init__(
        self,
        fleet: Fleet,
        round_macs: FloatArray,  # of each client
        clients: dict[int, RemoteClient],
        ledger: ClientLedger,
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._round_macs, self._clients = fleet, round_macs, clients
        self._ledger, self._seed, self._clock = ledger, seed, clock
        self._costs = ledger.costs
        self._participants: set[int] = set()
        self._batch_macs: dict[int, list[float]] = {client: [] for client in clients}
        self._open_batches: dict[int, SplitStepCost] = {}  # not charged yet
        self._best_speeds: dict[int, float] = {}
        self._start = clock()

    def available_clients(self) -> list[int]:
        available = [client for client in self._clients if self._is_available(client)]
        self._participants.update(available)
        return available

    def affordable_share(self, client: int, macs: float) -> float:
        speed = self._measure_speed(client)
        if speed is None:
            return 1.0
        return speed * self._fleet.round_seconds / float(self._round_macs[client])

    def slowdown(self, client: int, macs: float, upload_bytes: int) -> float:
        speed = self._measure_speed(client)
        return 1.0 if speed is None else self._best_speeds[client] / speed

    def compute(self, client: int, cost: SplitStepCost) -> bool:
        if not self._is_available(client):
            return False
        self._charge_batch(client)
        if cost.samples:
            self._open_batches[client] = cost
            self._batch_macs[client].append(cost.macs)
        else:
            self._batch_macs[client][-1] += cost.macs
            self._costs[client].macs += cost.macs
        return True

    def send(
        self, client: int, message: object | None, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        self._charge_batch(client)
        self._costs[client].up += self._ledger.count_bytes(message, shape, payload)
        return self._ledger.receive(client, message, shape, payload)

    def serve(self, client: int, cost: SplitStepCost) -> None:
        self._costs[client].server += cost.forward_macs

    def send_gradient(self, client: int, size: int, *, dense: int, nonzero: int) -> None:
        costs = self._costs[client]
        costs.down += size
        costs.dense += dense
        costs.nonzero += nonzero

    def transfer_part(self, sender: int, receiver: int, size: int) -> None:
        self._costs[sender].up += size
        self._costs[sender].relayed += size
        self._costs[receiver].down += size

    def sync_parts(self, clients: list[int], size: int) -> None:
        for client in clients:
            self.transfer_part(client, client, size)

    def barrier(self) -> None:
        """Do nothing: a late device is waited for when its message is needed."""

    def record_refusal(self, client: int, reason: str) -> None:
        self._costs[client].refused[reason] += 1

    def record_loss(self, client: int, loss: float) -> None:
        self._costs[client].losses.append(loss)

    def elapsed_seconds(self) -> float:
        """Return the length of the round so far."""
        return self._clock() - self._start

    def build_records(self, round_number: int) -> list[TaskRecord]:
        """Return the cost and outcome of each device that took part."""
        for client in self.available_clients():
            if self._clients[client].channel.wait_for_all_replies():
                self._charge_batch(client)
        length = max(self.elapsed_seconds(), 1e-9)
        records = []
        for client in sorted(self._participants):
            costs, remote = self._costs[client], self._clients[client]
            costs.refused.update(remote.problems)
            remote.problems.clear()
            costs.busy = min(sum(remote.channel.batch_seconds), length)
            costs.waited = length - costs.busy
            costs.has_left = not self._is_available(client)
            available_macs = costs.macs * length / costs.busy if costs.busy else costs.macs
            traffic = np.array([float(costs.up + costs.down)])
            device_costs = self._fleet.get_costs(np.array([client]), seed=self._seed)
            joules = float(compute_joules(device_costs, np.array([costs.macs]), traffic)[0])
            records.append(self._ledger.build_record(round_number, client, available_macs, joules))
        return records

    def _is_available(self, client: int) -> bool:
        return self._clients[client].channel.is_in_round and not self._costs[client].has_left

    def _charge_batch(self, client: int) -> None:
        """Charge the open mini-batch, once it is known to be computed."""
        step_cost = self._open_batches.pop(client, None)
        if step_cost is not None:
            costs = self._costs[client]
            costs.macs += step_cost.macs
            costs.forward += step_cost.forward_macs
            costs.samples += step_cost.samples
            costs.steps += 1

    def _measure_speed(self, client: int) -> float | None:
        """Return a device's current MAC/s from its last mini-batches; None before the first."""
        times = self._clients[client].channel.batch_seconds
        count = len(times)
        if not count:
            return None
        recent_macs = self._batch_macs[client][:count][-RECENT_BATCHES:]
        pairs = zip(recent_macs, times[-RECENT_BATCHES:], strict=False)
        speed = median(macs / seconds for macs, seconds in pairs)
        self._best_speeds[client] = max(speed, self._best_speeds.get(client, 0.0))
        return speed
