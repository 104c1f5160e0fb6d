"""Local training in workers: mini-batches that need no server are deferred until a part is needed.

Workers then run those of all clients, in short jobs, so that no client is left to run alone in the
end. A job is a pure function of a client's state and of its mini-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from pliant.params import Params
from pliant.split.client import BatchRequest, LocalClient, SplitClient
from pliant.split.session import Session
from pliant.workers.pool import AnyWorkers, Pool, open_pool

JOB_BATCHES = 16  # at most, in a job
MIN_BATCHES = 4  # for fewer, it is faster not to send a client's state to a worker and back

DeferredBatch = tuple[BatchRequest, bool]  # and whether it ends with a step


@dataclass(frozen=True)
class ClientJob:
    """Mini-batches of one client, and its state before them."""

    client: int
    batches: tuple[DeferredBatch, ...]
    state: Params


def run_client_job(session: Session, shared: Params, job: ClientJob) -> Params:
    """Run the mini-batches of a job and return the client's state after them."""
    client = session.clients[job.client]
    client.load_state_dict(job.state)
    run_batches(client, job.batches)
    return client.state_dict()


def run_batches(client: SplitClient, batches: Sequence[DeferredBatch]) -> None:
    """Run mini-batches that need no server."""
    for request, is_trained in batches:
        client.request_batch(request)
        if is_trained:
            client.backward(None)
        else:
            client.skip()


class DeferredWork:
    """The deferred mini-batches of all clients, and the workers that run them."""

    def __init__(self, workers: AnyWorkers, setup: Callable[[], Session]) -> None:
        self._workers, self._setup = workers, setup
        self._clients: list[DeferredClient] = []
        self._pool: Pool[ClientJob, Params] | None = None
        self._resources = ExitStack()

    def wrap(self, client: LocalClient) -> SplitClient:
        """Return a client that defers local mini-batches; one without a local loss has none."""
        if client.local_loss is None:
            return client
        self._clients.append(DeferredClient(client, self))
        return self._clients[-1]

    def finish(self, client: "DeferredClient") -> None:
        """Run what a client has deferred: here if it is little, else in workers with the others."""
        if len(client.batches) < MIN_BATCHES:
            run_batches(client.local, client.take_batches(MIN_BATCHES))
            return
        pool = self._open_pool()
        version = pool.share({})
        jobs = {self._submit(pool, version, c): c for c in self._clients if c.batches}
        while jobs:
            number, state = pool.collect(jobs)
            finished = jobs.pop(number)
            finished.local.load_state_dict(state)
            if finished.batches:
                jobs[self._submit(pool, version, finished)] = finished
        pool.release(version)

    def close(self) -> None:
        """Stop the workers."""
        self._resources.close()

    def _open_pool(self) -> Pool[ClientJob, Params]:
        if self._pool is None:
            opened = open_pool(self._workers, self._setup, run_client_job)
            self._pool = self._resources.enter_context(opened)
        return self._pool

    def _submit(self, pool: Pool[ClientJob, Params], version: int, client: "DeferredClient") -> int:
        batches = client.take_batches(JOB_BATCHES)
        job = ClientJob(client.local.number, batches, client.local.state_dict())
        return pool.submit(job, version)


class DeferredClient:
    """A client that defers mini-batches without a message until its part is needed."""

    def __init__(self, local: LocalClient, work: DeferredWork) -> None:
        self.local, self._work = local, work
        self.batches: list[DeferredBatch] = []
        self._request: BatchRequest | None = None  # of a mini-batch without a message

    def take_batches(self, limit: int) -> tuple[DeferredBatch, ...]:
        """Remove the first deferred mini-batches, and return them."""
        taken = tuple(self.batches[:limit])
        del self.batches[:limit]
        return taken

    def request_batch(self, request: BatchRequest) -> None:
        self._request = None if request.needs_activation else request
        if self._request is None:
            self._finish().request_batch(request)

    def forward(self) -> object:
        return self.local.forward()

    def backward(self, gradient: bytes | None) -> None:
        if self._request is None:
            self.local.backward(gradient)
        else:
            self.batches.append((self._request, True))

    def skip(self) -> None:
        if self._request is None:
            self.local.skip()
        else:
            self.batches.append((self._request, False))

    @property
    def params(self) -> Params:
        return self._finish().params

    def load_params(self, params: Mapping[str, Tensor]) -> None:
        self._finish().load_params(params)

    def digest(self) -> str:
        return self._finish().digest()

    def state_dict(self) -> Params:
        return self._finish().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._finish().load_state_dict(state)

    def _finish(self) -> LocalClient:
        if self.batches:
            self._work.finish(self)
        return self.local
