"""Worker pools: where a round's jobs run, without any effect on their results."""

import itertools
import reprlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch

from pliant import runtime
from pliant.params import Params
from pliant.storage.run_dir import TORCH_THREADS
from pliant.value import Count, Value
from pliant.workers.serialisation import copy_isolated, make_copier

MAX_ATTEMPTS = 3

W = TypeVar("W")
J = TypeVar("J")
R = TypeVar("R")
H = TypeVar("H")  # a backend's handle of a worker


class InlineWorkers(Value, frozen=True, tag="inline"):
    """Run jobs one after another in this process.

    >>> import pliant as pl
    >>> pl.InlineWorkers()
    InlineWorkers()
    """


class ProcessWorkers(Value, frozen=True, tag="processes"):
    """Run jobs in processes on this machine.

    >>> from pliant.workers.pool import ProcessWorkers
    >>> ProcessWorkers(count=2)
    ProcessWorkers(count=2)
    """

    count: Count | None = None  # None: one per core that this process may use


class RayWorkers(Value, frozen=True, tag="ray"):
    """Run jobs in actors of a Ray cluster, whose nodes should have the same processor.

    `address` is passed to `ray.init`: `host:port`, `auto` or `ray://host:port`; None starts Ray on
    this machine.

    >>> import pliant as pl
    >>> pl.RayWorkers(address="ray://head:10001", count=8).count
    8
    """

    address: str | None = None
    count: Count | None = None  # None: one per CPU of the cluster


AnyWorkers = InlineWorkers | ProcessWorkers | RayWorkers


class WorkerLost(RuntimeError):
    """Too many workers in a row died of the same job, or while starting."""


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Use one torch thread, and reuse freed memory, inside the context."""
    runtime.retain_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(TORCH_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def preload_modules(workers: AnyWorkers, *modules: str) -> None:
    """Begin to import what the processes of a later pool need, without waiting for it."""
    if isinstance(workers, ProcessWorkers):
        from pliant.workers import process_backend

        process_backend.preload_modules(*modules)


@contextmanager
def open_pool(
    workers: AnyWorkers, setup: Callable[[], W], run_job: Callable[[W, Params, J], R]
) -> Iterator["Pool[J, R]"]:
    """Open workers that each call `setup` once and then `run_job` for every job.

    `run_job` must be a pure function of the context that `setup` returned, the shared parameters
    and the job. Functions, jobs and results must be picklable. While the pool is open, torch has
    one thread in this process too, so that no result depends on the number of cores.
    """
    with use_one_thread(), closing(_make_pool(workers, setup, run_job)) as pool:
        yield pool


def _make_pool(
    workers: AnyWorkers, setup: Callable[[], W], run_job: Callable[[W, Params, J], R]
) -> "Pool[J, R]":
    # imported here so that reading a configuration does not need the backends
    match workers:
        case InlineWorkers():
            return Pool(1, _InlineBackend(setup, run_job))
        case ProcessWorkers():
            from pliant.workers.process_backend import ProcessBackend

            return Pool(workers.count or count_cores(), ProcessBackend(setup, run_job))
        case RayWorkers():
            from pliant.workers.ray_backend import RayBackend

            backend = RayBackend(workers.address, setup, run_job)
            return Pool(workers.count or backend.count_cpus(), backend)


class WorkerReply(NamedTuple):
    """A message from a worker: ready, a result, an exception with its traceback, or its death."""

    kind: Literal["ready", "done", "failed", "lost"]
    value: Any


class WorkerBackend(Protocol[H]):
    """Starts and reaches workers of one kind for a `Pool`."""

    def start(self) -> H:
        """Start a worker without waiting until it is ready."""

    def share(self, params: Params, version: int) -> None:
        """Give the workers the parameters for jobs of this version."""

    def release(self, version: int) -> None:
        """Forget the parameters of this version."""

    def submit(self, worker: H, job: object, version: int) -> None:
        """Send an idle worker a job; if the worker is dead, `poll` reports it."""

    def poll(self, workers: Collection[H]) -> Iterator[tuple[H, WorkerReply]]:
        """Wait for at least one reply and yield replies one at a time.

        A reply that is not consumed is returned by the next call.
        """

    def stop(self, workers: Collection[H]) -> None:
        """Stop workers, busy or not."""

    def close(self) -> None:
        """Release the resources of the backend."""


class _InlineBackend:
    """One worker, this process; jobs and results are copied, so that nothing is shared."""

    def __init__(self, setup: Callable[[], W], run_job: Callable[[W, Params, J], R]) -> None:
        self._context: Any = setup()
        self._run_job: Callable[[Any, Params, Any], Any] = run_job
        self._copiers: dict[int, Callable[[], Params]] = {}  # of parameters, by version
        self._reply = WorkerReply("ready", None)

    def start(self) -> int:
        self._reply = WorkerReply("ready", None)
        return 0

    def share(self, params: Params, version: int) -> None:
        self._copiers[version] = make_copier(params)

    def release(self, version: int) -> None:
        del self._copiers[version]

    def submit(self, worker: int, job: object, version: int) -> None:
        shared = self._copiers[version]()
        result = self._run_job(self._context, shared, copy_isolated(job))
        self._reply = WorkerReply("done", copy_isolated(result))

    def poll(self, workers: Collection[int]) -> Iterator[tuple[int, WorkerReply]]:
        yield 0, self._reply

    def stop(self, workers: Collection[int]) -> None: ...

    def close(self) -> None: ...


class Pool(Generic[J, R]):
    """A pool of `count` workers of a backend, which replaces workers that die."""

    def __init__(self, count: int, backend: WorkerBackend[Any]) -> None:
        self.count, self._backend = count, backend  # each worker has one torch thread
        self._starting: set[Any] = set()
        self._idle: list[Any] = []
        self._busy: dict[Any, int] = {}  # worker -> number of its job
        self._lost_starts: list[str] = []  # reasons, in a row
        self._jobs: dict[int, tuple[J, int]] = {}  # unfinished, with the version of their params
        self._waiting: deque[int] = deque()
        self._deaths: Counter[int] = Counter()  # of workers, by job
        self._results: dict[int, R] = {}
        self._numbers = itertools.count(1)
        try:
            self._start_missing()
        except BaseException:
            self.close()
            raise

    def run(
        self,
        jobs: Sequence[J],
        shared: Params,
        *,
        cost: Callable[[J], float] = lambda job: 0.0,
        on_finish: Callable[[J], None] = lambda job: None,
    ) -> list[R]:
        """Run the jobs, the costliest first, and return their results in the order of `jobs`.

        `on_finish` is called in this process with each finished job. Errors are those of `collect`.
        """
        results: dict[int, R] = {}
        with self._share_with(jobs, shared) as version:
            order = sorted(range(len(jobs)), key=lambda index: -cost(jobs[index]))
            indices = {self.submit(jobs[index], version): index for index in order}
            while indices:
                number, result = self.collect(indices)
                index = indices.pop(number)
                results[index] = result
                on_finish(jobs[index])
        return [results[index] for index in range(len(jobs))]

    def stream(self, jobs: Sequence[J], shared: Params) -> Generator[R, None, None]:
        """Yield the results in the order of `jobs`; at most two per worker are held back."""
        window = 2 * self.count
        with self._share_with(jobs, shared) as version:
            numbers = deque(self.submit(job, version) for job in jobs[:window])
            for index in range(len(jobs)):
                yield self.collect([numbers.popleft()])[1]
                if index + window < len(jobs):
                    numbers.append(self.submit(jobs[index + window], version))

    @contextmanager
    def _share_with(self, jobs: Sequence[J], shared: Params) -> Iterator[int]:
        version = self.share(shared) if jobs else 0
        try:
            yield version
        except BaseException:  # also if the caller wants no more results
            self.cancel()
            raise
        finally:
            if jobs:
                self.release(version)

    def share(self, params: Params) -> int:
        """Give the workers parameters for later jobs, and return their version."""
        self._lost_starts.clear()  # try again
        version = next(self._numbers)
        self._backend.share(params, version)
        return version

    def release(self, version: int) -> None:
        """Forget parameters that no unfinished job needs."""
        self._backend.release(version)

    def submit(self, job: J, version: int) -> int:
        """Queue a job with the parameters of this version, and return its number."""
        number = next(self._numbers)
        self._jobs[number] = job, version
        self._waiting.append(number)
        return number

    def collect(self, numbers: Collection[int]) -> tuple[int, R]:
        """Wait until one of these jobs has finished; return its number and, once, its result.

        An exception in a job is raised here, with the worker's traceback as a note. A job whose
        worker dies runs again; the third death in a row raises `WorkerLost`.
        """
        while not (finished := [number for number in self._results if number in numbers]):
            self._start_missing()
            self._submit_waiting()
            for worker, reply in self._backend.poll(self._list_workers()):
                number = self._update_worker(worker, reply)
                if number is not None:
                    self._finish_job(number, reply)
        self._submit_waiting()  # before this process turns to the result
        number = min(finished)
        return number, self._results.pop(number)

    def cancel(self) -> None:
        """Drop all jobs, even those that are running."""
        busy = list(self._busy)
        for jobs in (self._busy, self._jobs, self._waiting, self._deaths, self._results):
            jobs.clear()
        self._backend.stop(busy)

    def close(self) -> None:
        """Stop the workers."""
        try:
            self._backend.stop(self._list_workers())
        finally:
            self._backend.close()

    def _list_workers(self) -> list[Any]:
        return [*self._starting, *self._idle, *self._busy]

    def _start_missing(self) -> None:
        """Replace missing workers, unless starts keep failing; raise if there are no workers."""
        missing = self.count - len(self._starting) - len(self._idle) - len(self._busy)
        if not missing:
            return
        if len(self._lost_starts) < MAX_ATTEMPTS:
            self._starting.update(self._backend.start() for _ in range(missing))
        elif missing == self.count:
            raise WorkerLost(
                f"{len(self._lost_starts)} workers in a row died while starting"
                f" (last: {self._lost_starts[-1]})"
            )

    def _submit_waiting(self) -> None:
        while self._waiting and self._idle:
            worker, number = self._idle.pop(), self._waiting.popleft()
            self._busy[worker] = number
            self._backend.submit(worker, *self._jobs[number])

    def _finish_job(self, number: int, reply: WorkerReply) -> None:
        """Keep a job's result, raise its exception, or queue it again if its worker died."""
        job, _ = self._jobs[number]
        if reply.kind == "failed":
            raise _build_error(reply, f"job {_describe(job)}")
        if reply.kind == "done":
            self._results[number] = reply.value
            del self._jobs[number]
            return
        self._deaths[number] += 1
        if self._deaths[number] == MAX_ATTEMPTS:
            raise WorkerLost(
                f"job {_describe(job)} killed {MAX_ATTEMPTS} workers in a row (last: {reply.value})"
            )
        self._waiting.appendleft(number)

    def _update_worker(self, worker: Any, reply: WorkerReply) -> int | None:
        """Update a worker's state; return the number of the job that it ended, if any."""
        if worker in self._starting:
            self._starting.remove(worker)
            if reply.kind == "ready":
                self._lost_starts.clear()
                self._idle.append(worker)
                return None
            self._backend.stop([worker])
            if reply.kind == "failed":
                raise _build_error(reply, "setup")
            self._lost_starts.append(reply.value)
            return None
        number = self._busy.pop(worker, None)
        if reply.kind == "lost":
            if number is None:
                self._idle.remove(worker)
            self._backend.stop([worker])
        else:
            self._idle.append(worker)
        return number


def _build_error(reply: WorkerReply, activity: str) -> BaseException:
    error, traceback = reply.value
    assert isinstance(error, BaseException)
    error.add_note(f"in {activity}, in a worker:\n{traceback}")
    return error


def _describe(job: object) -> str:
    short = reprlib.Repr()
    short.maxother = 120
    return short.repr(job)


def count_cores(cgroup: Path = runtime.CGROUP) -> int:
    """Return how many workers this process has whole cores for, at least one."""
    return max(1, int(runtime.measure_cores(cgroup)))
