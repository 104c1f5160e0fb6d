"""When the download and the upload of each task of a round start and end."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pliant.devices import Fleet, LinkRates
from pliant.devices.vector_rng import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """The links of a round's tasks, and what is sent over them; times count from its start.

    A transfer takes the latency and the time that its bytes take at the link's rates; without
    bytes it takes no time. Times beyond `length` are unknown.
    """

    length: float
    latency: FloatArray
    down: LinkRates
    up: LinkRates
    down_bytes: FloatArray
    up_bytes: FloatArray

    @cached_property
    def download_end(self) -> FloatArray:
        """Return when each download is done; `length` if it does not end by then."""
        end = self.down.finish_time(self.latency, self.down_bytes)
        end = np.where(np.isfinite(end), end, self.length)
        return np.where(self.down_bytes > 0, end, 0.0)

    def estimate_upload(self, at: FloatArray) -> FloatArray:
        """Return the seconds of each upload at the rates at these times; `length` at rate 0."""
        if self.up.rates is None:
            return self._constant_upload
        return self._estimate_upload_at(self.up.rate(at))

    @cached_property
    def _constant_upload(self) -> FloatArray:
        return self._estimate_upload_at(self.up.constant)

    def _estimate_upload_at(self, rate: FloatArray) -> FloatArray:
        has_rate = rate > 0
        sending = np.where(has_rate, self.up_bytes / np.where(has_rate, rate, 1.0), self.length)
        return np.where(self.up_bytes > 0, self.latency + sending, 0.0)

    def find_latest_start(self, deadline: float) -> FloatArray:
        """Return when each upload has to start so that it arrives by the deadline."""
        latest = deadline - self.estimate_upload(np.zeros(len(self.latency)))
        if self.up.rates is None:
            return latest
        sent_by = np.maximum(deadline - self.latency, 0.0)
        start = self.up.latest_start(sent_by, self.up_bytes)
        return self._replace_changing(latest, np.where(self.up_bytes > 0, start, deadline))

    def compute_arrival(self, start: FloatArray) -> FloatArray:
        """Return when each upload that starts at these times arrives, or infinity."""
        arrival = start + self.estimate_upload(np.zeros(len(self.latency)))
        if self.up.rates is None:
            return arrival
        end = self.up.finish_time(np.minimum(start, self.length), self.up_bytes) + self.latency
        return self._replace_changing(arrival, np.where(self.up_bytes > 0, end, start))

    def count_received_bytes(self, until: FloatArray) -> FloatArray:
        """Return the whole bytes of its download that each device has received by its own time."""
        sending = self.download_end - self.latency
        share = (until - self.latency) / np.where(sending > 0, sending, np.inf)
        received = np.minimum(np.maximum(share, 0.0), 1.0) * self.down_bytes
        if self.down.rates is not None:
            changing = self.down.changing
            received[changing] = self.down.transferred(self.latency, until)[changing]
        is_complete = until >= self.download_end
        return np.where(is_complete, self.down_bytes, np.floor(received))

    def hold(self) -> "LinkTimes":
        """Return the times as planned at the start of the round, at the rates of that moment."""
        if self.down.rates is None and self.up.rates is None:
            return self
        return replace(self, down=self.down.hold(), up=self.up.hold())

    def _replace_changing(self, values: FloatArray, changing: FloatArray) -> FloatArray:
        values[self.up.changing] = changing[self.up.changing]
        return values


def compute_link_times(
    fleet: Fleet,
    devices: IntArray,
    down_bytes: FloatArray,
    up_bytes: FloatArray,
    *,
    seed: int,
    start: float,
    length: float,
) -> LinkTimes:
    """Return the link times of the tasks of a round that starts at virtual time `start`."""
    latency = fleet.get_costs(devices, seed=seed).latency
    down = fleet.compute_links(devices, "down", start, length, seed=seed)
    up = fleet.compute_links(devices, "up", start, length, seed=seed)
    return LinkTimes(length, latency, down, up, down_bytes, up_bytes)
