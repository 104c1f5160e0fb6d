"""Workers: where a round's jobs are performed; the results do not depend on the choice."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from pliant import memory
from pliant.engine.copies import copied
from pliant.params import Params
from pliant.record import THREADS
from pliant.value import Count, Value

W = TypeVar("W")
J = TypeVar("J")
R = TypeVar("R")


class Inline(Value, frozen=True, tag="inline"):
    """Perform the jobs one after another in this process.

    >>> import pliant as pl
    >>> pl.Inline()
    Inline()
    """


class Processes(Value, frozen=True, tag="processes"):
    """Perform the jobs in processes on this machine.

    >>> from pliant.engine.workers import Processes
    >>> Processes(count=2)
    Processes(count=2)
    """

    count: Count | None = None  # None: one per core that this process may use


class Cluster(Value, frozen=True, tag="ray"):
    """Perform the jobs in actors of a Ray cluster, whose nodes should have the same processor.

    `address` is what `ray.init` takes: `host:port`, `auto` or `ray://host:port`; None starts Ray on
    this machine.

    >>> import pliant as pl
    >>> pl.Cluster(address="ray://head:10001", count=8).count
    8
    """

    address: str | None = None
    count: Count | None = None  # None: one per CPU of the cluster


AnyWorkers = Inline | Processes | Cluster


class WorkerLost(RuntimeError):
    """A job, or its own start, ended a worker again and again."""


class Pool(Protocol[J, R]):
    """Workers that are ready for jobs."""

    @property
    def kind(self) -> AnyWorkers:
        """What was asked for."""

    @property
    def count(self) -> int:
        """How many workers there are, each with one torch thread."""

    def run(
        self,
        jobs: Sequence[J],
        shared: Params,
        *,
        cost: Callable[[J], float] | None = None,
        tell: Callable[[J], None] | None = None,
    ) -> list[R]:
        """Perform the jobs, the costliest first, and return their results in the order of jobs.

        `tell` is called here with each job as it ends.

        An exception in a job is raised here, with the worker's traceback as a note. A job whose
        worker dies is performed again; the third death in a row raises `WorkerLost`.
        """


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread, and steps the memory of those before them, while something trains."""
    memory.keep()
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def opened(
    kind: AnyWorkers, setup: Callable[[], W], perform: Callable[[W, Params, J], R]
) -> Iterator[Pool[J, R]]:
    """Open workers which each call `setup` once and then `perform` for every job.

    `perform` must be a pure function of the world that `setup` returned, the shared parameters and
    the job. Both functions must be picklable, as jobs and results must be. While workers are open,
    torch has one thread in this process too, so that no result depends on the number of cores.
    """
    with one_thread(), closing(_pool(kind, setup, perform)) as pool:
        yield pool


def _pool(
    kind: AnyWorkers, setup: Callable[[], W], perform: Callable[[W, Params, J], R]
) -> "_Closable[J, R]":
    # imported when chosen, so that a description can be read without them
    match kind:
        case Inline():
            return _InlinePool(kind, setup, perform)
        case Processes():
            from pliant.engine.processes import ProcessCrew
            from pliant.engine.relay import Relay

            return Relay(kind, kind.count or cores(), ProcessCrew(setup, perform))
        case Cluster():
            from pliant.engine.ray_crew import RayCrew
            from pliant.engine.relay import Relay

            crew = RayCrew(kind.address, setup, perform)
            return Relay(kind, kind.count or crew.capacity(), crew)


class _Closable(Pool[J, R], Protocol[J, R]):
    def close(self) -> None: ...


class _InlinePool:
    """Jobs see copies, and give copies, as they do in another process: no result can tell."""

    def __init__(
        self, kind: Inline, setup: Callable[[], W], perform: Callable[[W, Params, J], R]
    ) -> None:
        self.kind = kind
        self.count = 1
        self._world: Any = setup()
        self._perform: Callable[[Any, Params, Any], Any] = perform

    def run(
        self,
        jobs: Sequence[J],
        shared: Params,
        *,
        cost: Callable[[J], float] | None = None,
        tell: Callable[[J], None] | None = None,
    ) -> list[R]:
        results = []
        for job in jobs:
            results.append(copied(self._perform(self._world, copied(shared), copied(job))))
            if tell is not None:
                tell(job)
        return results

    def close(self) -> None:
        self._world = None


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: its affinity, and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = count or 1
    try:
        share, period = quota.read_text().split()
    except (OSError, ValueError):
        return found
    return found if share == "max" else max(1, min(found, int(share) // int(period)))
