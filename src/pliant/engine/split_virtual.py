"""Split rounds in virtual time: clocks of devices, links and the server, and clients' costs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isfinite

import numpy as np
from msgspec.structs import replace

from pliant.devices import Fleet
from pliant.devices.fleet import LinkDirection
from pliant.devices.vector_rng import FloatArray
from pliant.engine.ledger import TaskRecord
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import sample_dropout_times
from pliant.engine.split_ledger import build_task_records
from pliant.split.base import ClientCosts
from pliant.split.control import count_control_bytes

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
        settings: RunSettings,
        round_number: int,
        start: float,
        *,
        selected: Sequence[int] | None = None,  # None: all clients
        server_speed: float | None = None,
        has_left: Callable[[int], bool] = lambda client: False,
    ) -> None:
        self.fleet, self.round_macs, self.seed, self.start = fleet, round_macs, settings.seed, start
        self.clients = np.arange(len(round_macs))
        self.selected = self.clients.tolist() if selected is None else list(selected)
        self.dropout_times = sample_dropout_times(
            settings.rules,
            self.clients,
            seed=self.seed,
            round=round_number,
            round_seconds=fleet.round_seconds,
        )
        self.full_speeds = np.full(len(round_macs), fleet.macs_per_second or 0.0)
        if fleet.macs_per_second is None:
            self.full_speeds = round_macs / fleet.round_seconds
        self.device_costs = fleet.get_costs(self.clients, seed=self.seed)
        self.server_speed, self.has_left = server_speed, has_left
        self.costs = [ClientCosts() for _ in self.clients]
        self.participants: set[int] = set()  # were available in this round
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
        compute_links = partial(self.fleet.compute_links, self.clients, seed=self.seed)
        self._links = {
            "up": compute_links("up", self.start, seconds),
            "down": compute_links("down", self.start, seconds),
        }
        # a constant speed needs no search
        self.constant_speeds = [
            float(speed.levels[0, 0]) if speed.levels.shape[1] == 1 else None
            for speed in self.client_speeds
        ]

    def available_clients(self) -> list[int]:
        available = self._list_available()
        if not available:  # wait for the first client to become available
            times = {
                client: self._compute_finish(client, _TINY_SHARE * float(self.round_macs[client]))
                for client in self.selected
            }
            first = min((t for c, t in times.items() if t < self.dropout_times[c]), default=inf)
            if not isfinite(first):
                return []
            for client in self.selected:
                self._wait(client, first)
            available = self._list_available()
        self.participants.update(available)
        return available

    def affordable_share(self, client: int) -> float:
        return self._get_speed(client) * self.fleet.round_seconds / float(self.round_macs[client])

    def slowdown(self, client: int, macs: float, upload_bytes: int) -> float:
        full_speed = float(self.full_speeds[client])
        speed = max(self._get_speed(client), _TINY_SHARE * full_speed)
        while client in self._links["up"].changing and self.now[client] > self.horizon:
            self._extend_horizon(2 * self.horizon)
        rate = float(self._links["up"].rate(self.now)[client])
        if not rate:  # the upload takes so long that the speed does not matter
            return 1.0
        upload_seconds = float(self.device_costs.latency[client]) + upload_bytes / rate
        return (macs / speed + upload_seconds) / (macs / full_speed + upload_seconds)

    def estimate_seconds(self, client: int, macs: float, up: int, down: int) -> float:
        """Return the time that work and transfers take a client at its current rates."""
        speed = self._get_speed(client)
        rates = [float(self._links[link].rate(self.now)[client]) for link in ("up", "down")]
        if not speed or not all(rates):
            return inf
        return macs / speed + up / rates[0] + down / rates[1]

    def compute(self, client: int, macs: float, samples: int) -> bool:
        costs, start = self.costs[client], float(self.now[client])
        end = self._compute_finish(client, macs)
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
        costs.add_pass(macs, samples)
        costs.busy += end - start
        return True

    def upload(self, client: int, size: int) -> None:
        start = max(float(self.now[client]), float(self.uplink_free[client]))
        self.uplink_free[client] = self._finish_transfer("up", client, start, size)
        self.arrival[client] = self.uplink_free[client] + float(self.device_costs.latency[client])

    def serve(self, clients: Sequence[int], macs: float) -> None:
        self.participants.update(clients)  # one whose activations are kept may be absent
        start = max(self.server_free, *(float(self.arrival[client]) for client in clients))
        self.server_free = start + (macs / self.server_speed if self.server_speed else 0.0)
        self.server_done[list(clients)] = self.server_free

    def download(self, client: int, size: int) -> None:
        start = float(self.server_done[client])
        self._wait(client, self._finish_download(client, start, size), idle_until=start)

    def transfer(
        self, senders: Sequence[int], receivers: Sequence[int], sizes: Mapping[int, int]
    ) -> None:
        self.participants.update(senders)  # one that only passes its part on pays for it too
        for client in senders:
            self.upload(client, sizes[client])
        last_arrival = max(float(self.arrival[client]) for client in senders)
        for client in receivers:
            end = self._finish_download(client, last_arrival, sizes[client])
            self._wait(client, end, idle_until=last_arrival)

    def barrier(self) -> None:
        present = [client for client in self.selected if self._is_present(client)]
        if present:
            last = max(
                self.server_free,
                float(self.now[present].max()),
                float(self.server_done[present].max()),
            )
            for client in present:  # a message tells them to continue
                latency = float(self.device_costs.latency[client])
                self._wait(client, last + latency, idle_until=last)

    def seconds_elapsed(self) -> float:
        participants = sorted(self.participants)
        if not participants:
            return self.fleet.round_seconds
        return max(
            self.server_free,
            float(self.now[participants].max()),
            float(self.uplink_free[participants].max()),
        )

    def charge_control(self, records: list[TaskRecord]) -> list[TaskRecord]:
        charged = []
        for record in records:
            costs = self.costs[record.device]
            costs.requests += 1  # to keep its part
            charged.append(replace(record, control=count_control_bytes(costs, record.round)))
        return charged

    def charge_tests(self, formula_bytes: int) -> int:
        return formula_bytes

    def build_records(self, round_number: int) -> list[TaskRecord]:
        closed_at = self.seconds_elapsed()
        if closed_at > self.horizon:
            self._extend_horizon(2 * closed_at)
        available_macs = {}
        for client in sorted(self.participants):
            self._is_present(client)  # it may have left after its last mini-batch
            if not self.costs[client].has_left:
                self._add_idle(client, min(closed_at, float(self.dropout_times[client])))
            work = self.client_speeds[client].work(np.array([closed_at]))
            available_macs[client] = float(work[0])
        return build_task_records(round_number, self.costs, available_macs, self.device_costs)

    def _list_available(self) -> list[int]:
        return [c for c in self.selected if self._is_present(c) and self._get_speed(c) > 0]

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

    def _finish_download(self, client: int, start: float, size: int) -> float:
        links, latency = self._links["down"], float(self.device_costs.latency[client])
        if client in links.changing:
            return self._finish_transfer("down", client, start + latency, size)
        return start + (latency + size / float(links.constant[client]))

    def _finish_transfer(
        self, direction: LinkDirection, client: int, start: float, size: int
    ) -> float:
        while client in self._links[direction].changing:
            starts, sizes = np.full(len(self.now), start), np.full(len(self.now), float(size))
            end = float(self._links[direction].finish_time(starts, sizes)[client])
            if isfinite(end):
                return end
            if self.horizon > start + _MAX_WAIT_ROUNDS * self.fleet.round_seconds:
                raise ValueError(
                    f"Expected a link that carries {size} bytes within {_MAX_WAIT_ROUNDS} rounds, "
                    f"got one that does not: {direction} of device {client}"
                )
            self._extend_horizon(2 * self.horizon)
        return start + size / float(self._links[direction].constant[client])

    def _wait(self, client: int, until: float, *, idle_until: float | None = None) -> None:
        """Move a client's clock; from `idle_until` on it receives something."""
        seconds = until - float(self.now[client])
        if seconds > 0:
            self.costs[client].waited += seconds
            self._add_idle(client, until if idle_until is None else idle_until)
            self.now[client] = until

    def _add_idle(self, client: int, until: float) -> None:
        since = max(float(self.now[client]), float(self.uplink_free[client]))
        self.costs[client].idle += max(0.0, until - since)
