"""Split rounds in virtual time: clocks of devices, links and the server, and clients' costs."""

from collections.abc import Callable
from math import inf, isfinite

import numpy as np
from torch import Tensor

from pliant.devices import Fleet, compute_joules
from pliant.devices.vector_rng import FloatArray
from pliant.engine.ledger import TaskRecord
from pliant.engine.split_ledger import ClientLedger
from pliant.split.base import SplitStepCost
from pliant.split.payload import Payload

MessageHook = Callable[[int, object], object]  # (client, message) -> message as it arrives
_MAX_WAIT_ROUNDS = 1024  # after which a device that makes no progress is given up
_TINY_SHARE = 1e-9  # of a round's work; a device that can do this much is available


class VirtualEnvironment:
    """One round of clients working in parallel; times are seconds since the round's start.

    A device keeps computing while it sends, and sends one message at a time. The server handles
    messages in the order of the calls. All waiting of clients is counted.
    """

    def __init__(
        self,
        fleet: Fleet,
        round_macs: FloatArray,
        *,
        seed: int,
        start: float,
        dropout_times: FloatArray,
        server_speed: float | None,
        classes: int,
        client_classes: list[frozenset[int]],
        max_abs: float,
        message_hook: MessageHook = lambda client, message: message,
        has_left: Callable[[int], bool] = lambda client: False,
    ) -> None:
        self.fleet, self.round_macs, self.seed, self.start = fleet, round_macs, seed, start
        self.clients = np.arange(len(round_macs))
        self.full_speeds = np.full(len(round_macs), fleet.macs_per_second or 0.0)
        if fleet.macs_per_second is None:
            self.full_speeds = round_macs / fleet.round_seconds
        self.device_costs = fleet.get_costs(self.clients, seed=seed)
        self.dropout_times, self.server_speed = dropout_times, server_speed
        self.message_hook, self.has_left = message_hook, has_left
        self.ledger = ClientLedger(classes, client_classes, max_abs)
        self.costs = self.ledger.costs
        self.is_participant = np.zeros(len(round_macs), np.bool_)  # was available in this round
        self.now = np.zeros(len(round_macs))
        self.uplink_free = np.zeros(len(round_macs))  # when its uplink is free
        self.arrival = np.zeros(len(round_macs))  # of its last message
        self.server_done = np.zeros(len(round_macs))  # when the server has handled that message
        self.server_free = 0.0
        self._extend_horizon(4 * fleet.round_seconds)

    def _extend_horizon(self, seconds: float) -> None:
        self.horizon = seconds
        speeds = self.fleet.compute_speeds(self.clients, self.start, seconds, seed=self.seed)
        speeds = speeds.scale(self.full_speeds)
        self.client_speeds = [speeds.select(np.array([client])) for client in self.clients]
        # a constant speed needs no search
        self.constant_speeds = [
            float(speed.levels[0, 0]) if speed.levels.shape[1] == 1 else None
            for speed in self.client_speeds
        ]

    def available_clients(self) -> list[int]:
        available, everyone = self._list_available(), self.clients.tolist()
        if not available:  # wait for the first client to become available
            times = [
                self._compute_finish(client, _TINY_SHARE * float(self.round_macs[client]))
                for client in everyone
            ]
            times = [t if t < self.dropout_times[c] else inf for c, t in enumerate(times)]
            if not isfinite(min(times)):
                return []
            for client in everyone:
                self._wait(client, min(times))
            available = self._list_available()
        for client in available:
            self.is_participant[client] = True
        return available

    def affordable_share(self, client: int, macs: float) -> float:
        return self._get_speed(client) * self.fleet.round_seconds / float(self.round_macs[client])

    def slowdown(self, client: int, macs: float, upload_bytes: int) -> float:
        costs, full_speed = self.device_costs, float(self.full_speeds[client])
        upload_seconds = float(costs.latency[client]) + upload_bytes / float(costs.up[client])
        speed = max(self._get_speed(client), _TINY_SHARE * full_speed)
        return (macs / speed + upload_seconds) / (macs / full_speed + upload_seconds)

    def compute(self, client: int, cost: SplitStepCost) -> bool:
        costs, start = self.costs[client], float(self.now[client])
        end = self._compute_finish(client, cost.macs)
        stop = min(end, float(self.dropout_times[client]))
        if not isfinite(end) or end > self.dropout_times[client]:
            costs.has_left = True
            if isfinite(stop) and stop > start:
                speed = self.client_speeds[client]
                done = speed.work(np.array([stop])) - speed.work(np.array([start]))
                costs.macs += float(done[0])
                costs.busy += stop - start
                self.now[client] = stop
            return False
        self.now[client] = end
        costs.macs += cost.macs
        costs.forward += cost.forward_macs
        costs.samples += cost.samples
        costs.steps += cost.samples > 0
        costs.busy += end - start
        return True

    def send(
        self, client: int, message: object | None, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        if message is None:
            self._upload(client, self.ledger.count_bytes(None, shape, payload))
            self.ledger.record_dry_message(client, shape)
            return None
        arrived = self.message_hook(client, message)
        self._upload(client, self.ledger.count_bytes(arrived, shape, payload))
        return self.ledger.receive(client, arrived, shape, payload)

    def serve(self, client: int, cost: SplitStepCost) -> None:
        start = max(self.server_free, float(self.arrival[client]))
        self.server_free = start + (cost.macs / self.server_speed if self.server_speed else 0.0)
        self.server_done[client] = self.server_free
        self.costs[client].server += cost.forward_macs

    def send_gradient(self, client: int, size: int, *, dense: int, nonzero: int) -> None:
        costs = self.costs[client]
        costs.down += size
        costs.dense += dense
        costs.nonzero += nonzero
        self._wait(client, float(self.server_done[client]) + self._download_seconds(client, size))

    def transfer_part(self, sender: int, receiver: int, size: int) -> None:
        self._upload(sender, size)
        self.costs[sender].relayed += size
        self.costs[receiver].down += size
        self._wait(receiver, float(self.arrival[sender]) + self._download_seconds(receiver, size))

    def sync_parts(self, clients: list[int], size: int) -> None:
        for client in clients:
            self._upload(client, size)
            self.costs[client].relayed += size
            self.costs[client].down += size
        merged_at = max(float(self.arrival[client]) for client in clients)
        for client in clients:
            self._wait(client, merged_at + self._download_seconds(client, size))

    def barrier(self) -> None:
        present = [client for client in self.clients.tolist() if self._is_present(client)]
        if present:
            last = max(
                self.server_free,
                float(self.now[present].max()),
                float(self.server_done[present].max()),
            )
            for client in present:  # a message tells them to continue
                self._wait(client, last + float(self.device_costs.latency[client]))

    def record_refusal(self, client: int, reason: str) -> None:
        self.costs[client].refused[reason] += 1

    def record_loss(self, client: int, loss: float) -> None:
        self.costs[client].losses.append(loss)

    def elapsed_seconds(self) -> float:
        """Return the length of the round."""
        participants = np.flatnonzero(self.is_participant)
        if not len(participants):
            return self.fleet.round_seconds
        return max(
            self.server_free,
            float(self.now[participants].max()),
            float(self.uplink_free[participants].max()),
        )

    def build_records(self, round_number: int) -> list[TaskRecord]:
        """Return what each participant cost and how it ended."""
        closed_at = self.elapsed_seconds()
        if closed_at > self.horizon:
            self._extend_horizon(2 * closed_at)
        joules = compute_joules(
            self.device_costs,
            np.array([costs.macs for costs in self.costs]),
            np.array([float(costs.up + costs.down) for costs in self.costs]),
        )
        records = []
        for client in np.flatnonzero(self.is_participant).tolist():
            self._is_present(client)  # it may have left after its last mini-batch
            available = float(self.client_speeds[client].work(np.array([closed_at]))[0])
            records.append(
                self.ledger.build_record(round_number, client, available, float(joules[client]))
            )
        return records

    def _list_available(self) -> list[int]:
        return [c for c in self.clients.tolist() if self._is_present(c) and self._get_speed(c) > 0]

    def _is_present(self, client: int) -> bool:
        costs = self.costs[client]
        costs.has_left |= self.has_left(client)
        return not costs.has_left and bool(self.now[client] < self.dropout_times[client])

    def _get_speed(self, client: int) -> float:
        constant_speed = self.constant_speeds[client]
        if constant_speed is not None:
            return constant_speed
        while self.now[client] > self.horizon:
            self._extend_horizon(2 * self.horizon)
        return float(self.client_speeds[client].speed(self.now[client : client + 1])[0])

    def _compute_finish(self, client: int, macs: float) -> float:
        constant_speed = self.constant_speeds[client]
        if constant_speed:
            return float(self.now[client]) + macs / constant_speed
        while True:
            now = self.now[client : client + 1]
            end = float(self.client_speeds[client].finish_time(now, np.array([macs]))[0])
            gives_up = self.horizon > self.now[client] + _MAX_WAIT_ROUNDS * self.fleet.round_seconds
            if isfinite(end) or gives_up:
                return end
            self._extend_horizon(2 * self.horizon)

    def _upload(self, client: int, size: int) -> None:
        start = max(float(self.now[client]), float(self.uplink_free[client]))
        self.uplink_free[client] = start + size / float(self.device_costs.up[client])
        self.arrival[client] = self.uplink_free[client] + float(self.device_costs.latency[client])
        self.costs[client].up += size

    def _download_seconds(self, client: int, size: int) -> float:
        costs = self.device_costs
        return float(costs.latency[client]) + size / float(costs.down[client])

    def _wait(self, client: int, until: float) -> None:
        seconds = until - float(self.now[client])
        if seconds > 0:
            self.costs[client].waited += seconds
            self.now[client] = until
