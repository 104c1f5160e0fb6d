"""Worker actors on a Ray cluster (needs the extra `cluster`)."""

import logging
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.extras import require
from pliant.params import Params
from pliant.workers.pool import WorkerReply
from pliant.workers.serialisation import deserialise, serialise
from pliant.workers.worker_main import JobRunner


@dataclass(eq=False)
class RayHandle:
    """An actor and the reference of its pending call, if any."""

    actor: Any
    pending_ref: Any


class RayBackend:
    """Actors with one CPU each, spread over the nodes, with parameters in Ray's object store.

    Library versions are up to the cluster. Ray reads its token authentication from the environment
    (`RAY_AUTH_MODE`, `RAY_AUTH_TOKEN`).
    """

    def __init__(
        self,
        address: str | None,
        setup: Callable[[], Any],
        run_job: Callable[[Any, Params, Any], Any],
    ) -> None:
        self._ray: Any = require("ray", "cluster")
        # unlike pickle, it sends functions of the user's script by value
        functions = require("ray.cloudpickle", "cluster").dumps((setup, run_job))
        self._has_started_ray = not self._ray.is_initialized()
        if self._has_started_ray:
            _connect(self._ray, address)
        self._functions = self._ray.put(functions)
        # Ray's own restarts would repeat jobs uncounted and skip the setup
        self._actor_class = self._ray.remote(num_cpus=1, max_restarts=0)(JobRunner)
        self._shared: dict[int, Any] = {}  # references, by version

    def count_cpus(self) -> int:
        """Return how many CPUs the cluster has now."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def start(self) -> RayHandle:
        actor = self._actor_class.options(scheduling_strategy="SPREAD").remote()
        return RayHandle(actor, actor.prepare.remote(self._functions))

    def share(self, params: Params, version: int) -> None:
        self._shared[version] = self._ray.put(np.frombuffer(serialise(params), np.uint8))

    def release(self, version: int) -> None:
        del self._shared[version]

    def submit(self, worker: RayHandle, job: object, version: int) -> None:
        worker.pending_ref = worker.actor.run.remote(self._shared[version], serialise(job))

    def poll(self, workers: Collection[RayHandle]) -> Iterator[tuple[RayHandle, WorkerReply]]:
        by_ref = {
            worker.pending_ref: worker for worker in workers if worker.pending_ref is not None
        }
        for ref in self._ray.wait(list(by_ref), num_returns=1)[0]:
            worker = by_ref[ref]
            worker.pending_ref = None
            yield worker, self._fetch_reply(ref)

    def stop(self, workers: Collection[RayHandle]) -> None:
        for worker in workers:
            self._ray.kill(worker.actor)

    def close(self) -> None:
        self._functions, self._shared = None, {}
        if self._has_started_ray:
            self._ray.shutdown()

    def _fetch_reply(self, ref: Any) -> WorkerReply:
        errors = self._ray.exceptions
        try:
            message = self._ray.get(ref)
        except errors.RayTaskError:  # another worker would fail too
            raise
        except errors.RayError as error:
            return WorkerReply("lost", " ".join(str(error).split()))
        return WorkerReply(*deserialise(message))


def _connect(ray: Any, address: str | None) -> None:
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        ray.init(
            address=address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(f"no Ray cluster answers at {address}: {reason}") from None
