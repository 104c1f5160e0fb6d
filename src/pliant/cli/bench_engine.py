"""`pliant bench engine`: what the engine costs beside the training that it manages."""

import gc
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from pliant.cli.bench_bare import BATCH, LR, BareLoop
from pliant.cli.timing import interleaved
from pliant.data import Federated, Iid, Images
from pliant.data.federated import Source
from pliant.devices import FULL, Changing, Fleet, PerBatch, Plan, Rows
from pliant.engine.evaluate import Evaluation
from pliant.engine.ledger import RoundRecord
from pliant.engine.schedule import timetable
from pliant.engine.simulate import Setting, simulate
from pliant.engine.tasks import tasks
from pliant.engine.workers import AnyWorkers, Inline, Processes, cores
from pliant.methods import FedAvg, Local
from pliant.methods.base import Method, Place, State, Step, Task, Update
from pliant.nn.elastic import Elastic
from pliant.nn.models import digits_cnn, femnist_cnn
from pliant.nn.optimiser import Sgd
from pliant.nn.subnet import Subnet
from pliant.value import Value

PER_ROUND = 10


class Measured(Value, frozen=True):
    """One number and the limit that it must not exceed."""

    what: str
    value: float
    unit: str = ""
    limit: float | None = None  # None: for comparison only

    @property
    def is_met(self) -> bool:
        """Tell whether the value is within its limit."""
        return self.limit is None or self.value <= self.limit


class Nothing(Value, frozen=True):
    """A method that trains nothing: what is left is the engine."""

    local: Local = Local()

    def plan(self, net: Elastic) -> Plan:
        return FULL

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        return net.full

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        still = {name: torch.zeros_like(tensor) for name, tensor in task.params.items()}
        device, trained = task.place.device, ((net.full, 1),)
        return Update(device, still, 1, 1, 1.0, 0.0, owned=task.owned, trained=trained)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        return state


def tiny() -> tuple[nn.Module, Federated]:
    """Make as small a network as there is, and five mini-batches on each of 100 devices."""
    head = (nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(72, 10))
    return nn.Sequential(nn.Conv2d(1, 8, 5), *head), _random(160, 1, 28)


def digits_like(samples: int = 160, hidden: int = 128) -> tuple[nn.Module, Federated]:
    """Make the network for the digits, and random images on 100 devices."""
    return digits_cnn(hidden=hidden), _random(samples, 1, 28)


def cifar_like() -> tuple[nn.Module, Federated]:
    """Make two convolutions and two linear layers, and 500 random images on each of 100 devices."""
    return femnist_cnn(10, channels=3, side=32), _random(500, 3, 32)


def _random(samples: int, channels: int, side: int) -> Federated:
    draws = torch.Generator().manual_seed(0)

    def images(count: int) -> Images:
        shape = (count, channels, side, side)
        pixels = torch.randint(0, 256, shape, generator=draws, dtype=torch.uint8)
        return Images.from_tensors(pixels, torch.arange(count) % 10)

    return Source(images(100 * samples + 10), images(100)).share(Iid(), 100, proxy=10)


ENDLESS = 10**9  # rounds: as many as there is time for
NEVER = Evaluation(every=ENDLESS)


def running(
    method: Method,
    make: Callable[[], tuple[nn.Module, Federated]],
    *,
    rounds: int = ENDLESS,
    size: int = 100,
    folder: Path | None = None,
    workers: AnyWorkers | None = None,
    evaluation: Evaluation = NEVER,
) -> Generator[RoundRecord, None, None]:
    """Begin a run in the ordinary setting, but evaluated only at its end."""
    net, data = make()
    yield from simulate(
        method,
        net,
        data,
        Fleet(size=size),
        setting=Setting(rounds=rounds, per_round=PER_ROUND, evaluation=evaluation),
        workers=workers or Inline(),
        folder=folder,
        source=make,
    )


def measure() -> Iterator[Measured]:
    """Measure one thing after another."""
    torch.set_num_threads(1)
    yield from empty_rounds()
    yield from training()
    yield from start_up()
    yield from fleets()
    yield from growth()
    yield from timetables()


def empty_rounds(seconds: float = 6.0) -> Iterator[Measured]:
    """Time rounds of a method that trains nothing: what a round is asked to do grows by the row."""
    begun = partial(running, Nothing())
    with tempfile.TemporaryDirectory() as name:
        kinds = {
            "tiny": begun(tiny),
            "on disk": begun(tiny, folder=Path(name, "run")),
            "evaluated": begun(tiny, folder=Path(name, "evaluated"), evaluation=Evaluation()),
            "digits": begun(digits_like),
        }
        times = _rounds(kinds, seconds)
    yield Measured("round of 10 devices that train nothing", 1e3 * times["tiny"], "ms", 5.0)
    yield Measured("  records and checkpoints on disk too", 1e3 * times["on disk"], "ms", 5.0)
    yield Measured("  evaluated on 100 images too", 1e3 * times["evaluated"], "ms")
    yield Measured("  with the digits' network, sent to and fro", 1e3 * times["digits"], "ms")


def training(seconds: float = 20.0) -> Iterator[Measured]:
    """Time FedAvg against a bare loop of PyTorch with as many worker processes."""
    count = cores()
    records = running(FedAvg(Local(Sgd(lr=LR), BATCH)), cifar_like, workers=Processes(count))
    with BareLoop(cifar_like, count) as bare, closing(records):
        times = interleaved(
            {
                "engine": partial(next, records),
                "bare": partial(bare.round, PER_ROUND, channels_last=False),
                "bare, last": partial(bare.round, PER_ROUND, channels_last=True),
            },
            seconds=seconds,
        )
    yield Measured("FedAvg, 10 of 100 devices with 500 images: a round", times["engine"], "s")
    yield Measured("  bare PyTorch loop", times["bare"], "s")
    yield Measured("  engine / bare loop", times["engine"] / times["bare"], "", 1.05)
    yield Measured("  engine / bare loop in channels-last", times["engine"] / times["bare, last"])


def start_up() -> Iterator[Measured]:
    """Time the way to the first round in a process that has only imported pliant."""
    yield Measured("start-up after imports, inline", _apart(_first, Inline()), "s", 3.0)
    yield Measured(
        "start-up with worker processes, their imports too", _apart(_first, Processes()), "s"
    )


def fleets(seconds: float = 4.0) -> Iterator[Measured]:
    """Compare a fleet of a million devices with one of a thousand."""
    sizes = (1_000, 1_000_000)
    times = _rounds({str(size): running(Nothing(), tiny, size=size) for size in sizes}, seconds)
    memory = [_apart(_peak, size) for size in sizes]
    yield Measured("1,000,000 / 1,000 devices, time", times["1000000"] / times["1000"], "", 1.1)
    yield Measured("1,000,000 / 1,000 devices, memory", memory[1] / memory[0], "", 1.1)


def growth() -> Iterator[Measured]:
    """Measure how memory grows over a thousand rounds of training."""
    yield Measured("memory at round 1,000 / round 50", _apart(_grown, 1000), "", 1.05)


def timetables(seconds: float = 2.0) -> Iterator[Measured]:
    """Time the timetable of a large round."""
    fleet = Fleet(size=10_000, speed=Changing(per_round=4.0))
    plan = PerBatch(Rows(tuple(np.linspace(0.1, 1.0, 64).tolist())))
    work = tasks(np.arange(10_000), batches=16, full=10.0)
    times = interleaved({"table": lambda: timetable(fleet, plan, work)}, seconds=seconds)
    yield Measured("timetable of 10,000 devices x 16 mini-batches", times["table"], "s", 1.0)


def _rounds(
    kinds: Mapping[str, Generator[RoundRecord, None, None]], seconds: float
) -> dict[str, float]:
    """Return the median seconds of a round of each kind."""
    with ExitStack() as stack:
        work = {kind: partial(next, stack.enter_context(closing(kinds[kind]))) for kind in kinds}
        return interleaved(work, seconds=seconds)


def _apart(work: Callable[[Any], float], given: object) -> float:
    """Return what a function finds in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, given).result()


def _first(workers: AnyWorkers) -> float:
    # this module's imports are over: what follows is what every run has to do
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with closing(running(Nothing(), digits_like, workers=workers)) as records:
        next(records)
        return time.perf_counter() - begin


def _peak(size: int) -> float:
    torch.set_num_threads(1)
    for _ in running(Nothing(), tiny, rounds=100, size=size):
        pass
    return float(psutil.Process().memory_info().rss)


def _grown(rounds: int) -> float:
    torch.set_num_threads(1)
    sizes = {}
    method = FedAvg(Local(Sgd(lr=0.01), BATCH))
    with tempfile.TemporaryDirectory() as name:
        records = running(
            method, partial(digits_like, 16), rounds=rounds, size=10_000, folder=Path(name, "run")
        )
        for record in records:
            if record.round + 1 in (50, rounds):
                gc.collect()
                sizes[record.round + 1] = psutil.Process().memory_info().rss
    return float(sizes[rounds] / sizes[50])
