"""Worker actors of a Ray cluster, for the extra `cluster`."""

import logging
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.engine.relay import Answer
from pliant.engine.resident import Resident
from pliant.engine.wire import decoded, message
from pliant.extras import need
from pliant.params import Params


@dataclass(eq=False)
class Worker:
    """An actor and what it was asked last, if it has not answered."""

    actor: Any
    question: Any


class Actor:
    """A resident whose messages Ray carries."""

    def __init__(self) -> None:
        self._resident = Resident()

    def prepare(self, functions: bytes) -> bytes:
        return self._resident.prepare(functions)

    def answer(self, shared: Any, job: bytes) -> bytes:
        # Ray's store is read-only memory, and a write to it would end the process: so a copy
        return self._resident.answer(lambda: decoded(shared), job)


class RayCrew:
    """Actors with one CPU each, spread over the nodes; what they share lies in each node's store.

    Threads and library versions are the cluster's affair; token authentication is Ray's own
    (`RAY_AUTH_MODE`, `RAY_AUTH_TOKEN`), read from the environment.
    """

    def __init__(
        self,
        address: str | None,
        setup: Callable[[], Any],
        perform: Callable[[Any, Params, Any], Any],
    ) -> None:
        self._ray: Any = need("ray", "cluster")
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            _connect(self._ray, address)
        try:
            # unlike pickle, it sends what the user's own script defines
            pickled = need("ray.cloudpickle", "cluster").dumps((setup, perform))
            self._functions = self._ray.put(pickled)
        except BaseException:
            self.close()
            raise
        # Ray's own restarts would repeat a job without counting, or build no world
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0)(Actor)
        self._shared: Any = None

    def capacity(self) -> int:
        """Return how many CPUs the cluster has now."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def hire(self) -> Worker:
        actor = self._actor.options(scheduling_strategy="SPREAD").remote()
        return Worker(actor, actor.prepare.remote(self._functions))

    def share(self, shared: Params) -> None:
        self._shared = self._ray.put(np.frombuffer(message(shared), np.uint8))

    def hand(self, worker: Worker, job: object) -> None:
        worker.question = worker.actor.answer.remote(self._shared, message(job))

    def hear(self, workers: Collection[Worker]) -> Iterator[tuple[Worker, Answer]]:
        asked = {worker.question: worker for worker in workers if worker.question is not None}
        for question in self._ray.wait(list(asked), num_returns=1)[0]:
            worker = asked[question]
            worker.question = None
            yield worker, self._answer(question)

    def dismiss(self, workers: Collection[Worker]) -> None:
        for worker in workers:
            self._ray.kill(worker.actor)

    def close(self) -> None:
        self._functions = self._shared = None
        if self._is_ours:
            self._ray.shutdown()

    def _answer(self, question: Any) -> Answer:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(question)
        except errors.RayTaskError:  # nothing that another worker would do better
            raise
        except errors.RayError as error:
            return Answer("lost", " ".join(str(error).split()))
        return Answer(*decoded(answer))


def _connect(ray: Any, address: str | None) -> None:
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
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
